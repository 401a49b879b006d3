"""The rendered kernels of parts: written as one module, and compiled in several processes.

Triton caches compiled kernels on disk, so other processes can fill the cache: they call each kernel once, on few rows.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import torch
from torch._inductor import config as inductor

from loka.bench.device import describe
from loka.bench.machine import device_here
from loka.bench.record.gemm_parts import PreparedCall
from loka.bench.record.interaction_parts import InteractionParts
from loka.bench.record.interaction_parts import specs_of as interaction_specs
from loka.bench.record.producer_parts import Producers, specs_of
from loka.bench.timing import Progress
from loka.errors import LokaError
from loka.kernels.fused.rendering import OPERATORS_FILE, AnySpec, render_all, render_files
from loka.kernels.measurements.interaction_forms import BACKWARDS, family
from loka.kernels.measurements.parts import COMPILED, INTERACTIONS, Part, PartKind
from loka.templating.templates import load_templates

PACKAGE = "loka_record_kernels"
FEW_ROWS = 256  # of the first call


class CompiledKernels:
    """The module of the kernels of these parts, in a temporary folder."""

    def __init__(self, parts: Sequence[Part], folder: Path) -> None:
        """Render and write the kernels."""
        self._folder = folder
        self._parts = parts
        specs = dict.fromkeys(spec for part in parts for spec in _specs(part))
        templates = load_templates()
        kernels = render_all(specs, templates, device=device_here())
        files = render_files(kernels, templates, "loka bench kernels")
        package = folder / PACKAGE
        package.mkdir()
        for file, text in {**files, "__init__.py": ""}.items():
            (package / file).write_text(text, encoding="utf-8")

    def module(self) -> ModuleType:
        """The module with the kernels' operators."""
        return load(self._folder)

    def compile(self, jobs: int, progress: Progress) -> None:
        """Compile each kernel in one of `jobs` processes; failures are reported, and occur again when measuring."""
        first: dict[tuple[object, ...], Part] = {}
        # Backwards first: compiling a step compiles its forward too.
        for part in sorted(self._parts, key=lambda part: part.work not in BACKWARDS):
            if part.kernel == COMPILED:
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


def load(folder: Path) -> ModuleType:
    """Import the module of kernels from a folder, in place of one loaded from another folder."""
    loaded = sys.modules.get(PACKAGE)
    if loaded is None or Path(loaded.__file__ or "").parent.parent != folder:
        for name in [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]:
            del sys.modules[name]
        if sys.path[0] != str(folder):
            sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
    return importlib.import_module(f"{PACKAGE}.{OPERATORS_FILE.removesuffix('.py')}")


def compile_parts(folder: str, parts: Sequence[Part]) -> list[str]:
    """Call each part's kernels once; returns a line for each failure. Runs in a child process."""
    producers, interactions = Producers(lambda: load(Path(folder))), InteractionParts(lambda: load(Path(folder)))

    def prepare(part: Part) -> PreparedCall:
        if part.work in INTERACTIONS:  # torch.compile specialises on the number of samples
            few = part if part.kernel == COMPILED else replace(part, rows=FEW_ROWS)
            return interactions.prepare(few)
        return producers.prepare(replace(part, rows=FEW_ROWS))

    inductor.compile_threads = 1  # there are many processes already
    failures = []
    for part in parts:
        try:
            prepared = prepare(part)
            prepared.call(*prepared.arguments)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # for the other processes
        except Exception as error:  # noqa: BLE001  (of compiler or driver: reported, and the others still compile)
            failures.append(f"{part}: {describe(error)}")
    return failures


def _specs(part: Part) -> tuple[AnySpec, ...]:
    """A part's kernels; none for a GEMM, nor for a part without a rendered kernel, which measuring reports."""
    if part.work is PartKind.GEMM or part.kernel == COMPILED:
        return ()
    with contextlib.suppress(LokaError):
        return interaction_specs(part) if part.work in INTERACTIONS else specs_of(part)
    return ()
