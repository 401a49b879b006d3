"""The rendered kernels of parts: all of them written as one module, and compiled in several processes at once.

Triton keeps what it compiled on disk, so that a process of its own can do it: it calls each kernel once, on few rows.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._inductor import config as inductor

from loka.bench.record.gemm_parts import TRITON, Gemms, PreparedCall, parse_recipe
from loka.bench.record.interaction_parts import InteractionParts
from loka.bench.record.interaction_parts import specs_of as interaction_specs
from loka.bench.record.part_specs import specs_of
from loka.bench.record.producer_parts import Producers
from loka.bench.speed.comparison import Progress, describe
from loka.errors import InputError, LokaError
from loka.kernels.fused.rendering import KERNELS_FILE, AnySpec, Rendered, load_kernel_templates, render, render_files
from loka.kernels.fused.triton_gemm.gemm_spec import FLOATS, Epilogue, TiledGemm
from loka.kernels.fused.triton_gemm.gemm_tiling import candidates
from loka.kernels.measurements.interaction_forms import BACKWARDS, family
from loka.kernels.measurements.parts import COMPILED, INTERACTIONS, Part, PartKind
from loka.numerics.enums import Format

PACKAGE = "loka_record_kernels"
TILINGS = 3  # in which a product is rendered, at most
FEW_ROWS = 256  # of the first call


class CompiledKernels:
    """The modules of the kernels of these parts, in a folder that is there for the time of measuring.

    Products are rendered in up to TILINGS ways, each in a module of its own: `PACKAGE_0` has the first of each.
    """

    def __init__(self, parts: Sequence[Part], folder: Path) -> None:
        """Write them."""
        specs = list(dict.fromkeys(spec for part in parts for spec in _specs(part)))
        self._folder = folder
        self._parts = parts
        templates = load_kernel_templates()
        self._write(PACKAGE, [render(spec, templates) for spec in specs])
        products = list(dict.fromkeys(product_of(part) for part in parts if part.kernel == TRITON))
        for index in range(TILINGS):
            tiled = [(spec, tilings[index]) for spec in products if index < len(tilings := candidates(spec))]
            self._write(f"{PACKAGE}_{index}", [render(spec, templates, tiling) for spec, tiling in tiled])

    def module(self) -> ModuleType:
        """The host functions of the kernels that are no products."""
        return load(self._folder)

    def products(self, part: Part) -> tuple[Callable[..., Any], ...]:
        """The host functions of a part of our own product in Triton, one for each way."""
        return products_in(self._folder, part)

    def _write(self, name: str, kernels: Sequence[Rendered]) -> None:
        package = self._folder / name
        package.mkdir()
        files = render_files(kernels, load_kernel_templates(), "loka bench kernels")
        for file, text in {**files, "__init__.py": ""}.items():
            (package / file).write_text(text, encoding="utf-8")

    def compile(self, jobs: int, progress: Progress) -> None:
        """Compile each kernel in one of `jobs` processes; what does not compile is told, and fails again later."""
        first: dict[tuple[object, ...], Part] = {}
        for part in sorted(self._parts, key=lambda part: part.work not in BACKWARDS):  # a step compiles its forward
            if part.kernel == TRITON:
                first.setdefault((product_of(part),), part)
            elif part.kernel == COMPILED:
                first.setdefault((replace(part, work=family(part.work)),), part)
            elif specs := _specs(part):
                first.setdefault((specs, part.dtype), part)
        parts = list(first.values())
        if not parts or jobs < 1:
            return
        progress(f"compiling {len(parts)} kernels in {jobs} processes")
        chunks = [parts[start::jobs] for start in range(min(jobs, len(parts)))]
        with ProcessPoolExecutor(len(chunks), get_context("spawn")) as pool:
            for failures in pool.map(compile_parts, [str(self._folder)] * len(chunks), chunks):
                for failure in failures:
                    progress(failure)


def product_of(part: Part) -> TiledGemm:
    """What our own product is rendered for. Raises InputError where it cannot be."""
    recipe = parse_recipe(part.recipe)
    if part.dtype not in FLOATS or recipe.formats != (Format.E4M3, Format.E4M3):
        raise InputError(f"{part.kernel}: takes e4m3 and writes {', '.join(FLOATS)}, not {part.recipe} to {part.dtype}")
    first, second = recipe.scalings
    epilogue = Epilogue(out=part.dtype)
    return TiledGemm(part.columns, part.contraction, "e4m3", recipe.accumulation, first, second, epilogue)


def products_in(folder: Path, part: Part) -> tuple[Callable[..., Any], ...]:
    """The host functions of a part's product in a folder."""
    spec = product_of(part)
    ways = range(min(TILINGS, len(candidates(spec))))
    return tuple(getattr(load(folder, f"{PACKAGE}_{index}"), spec.function) for index in ways)


def load(folder: Path, package: str = PACKAGE) -> ModuleType:
    """A module of kernels in a folder; one of that name that came from another folder gives way to it."""
    loaded = sys.modules.get(package)
    if loaded is None or Path(loaded.__file__ or "").parent.parent != folder:
        for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
            del sys.modules[name]
        if sys.path[0] != str(folder):
            sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
    return importlib.import_module(f"{package}.{KERNELS_FILE.removesuffix('.py')}")


def compile_parts(folder: str, parts: Sequence[Part]) -> list[str]:
    """Call each part's kernels once, in a process of its own; a line for each that cannot be."""
    gemms = Gemms(rendered=lambda part: products_in(Path(folder), part))
    producers, interactions = Producers(lambda: load(Path(folder))), InteractionParts(lambda: load(Path(folder)))

    def prepare(part: Part) -> Sequence[PreparedCall]:
        if part.work in INTERACTIONS:  # torch.compile is for the very number of samples
            few = part if part.kernel == COMPILED else replace(part, rows=FEW_ROWS)
            return interactions.prepare(few)
        bench = gemms if part.work is PartKind.GEMM else producers
        return bench.prepare(replace(part, rows=FEW_ROWS))

    inductor.compile_threads = 1  # these processes are many already
    failures = []
    for part in parts:
        try:
            for prepared in prepare(part):
                prepared.call(*prepared.arguments)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # for the other processes
        except Exception as error:  # noqa: BLE001  (a compiler's or a driver's: it is told, and the others are compiled)
            failures.append(f"{part}: {describe(error)}")
    return failures


def _specs(part: Part) -> tuple[AnySpec, ...]:
    """A part's kernels; none for a GEMM, nor where no kernel is rendered for it, which its measurement will tell."""
    if part.work is PartKind.GEMM or part.kernel == COMPILED:
        return ()
    with contextlib.suppress(LokaError):
        return interaction_specs(part) if part.work in INTERACTIONS else specs_of(part)
    return ()
