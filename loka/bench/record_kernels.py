"""The rendered kernels of parts: all of them written as one module, and compiled in several processes at once.

Triton keeps what it compiled on disk, so that a process of its own can do it: it calls each kernel once, on few rows.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import torch

from loka.bench.comparison import Progress, describe
from loka.bench.record_producers import Producers
from loka.bench.record_specs import specs_of
from loka.errors import LokaError
from loka.kernels.parts import Part, Work
from loka.kernels.rendered_specs import Spec
from loka.kernels.rendering import KERNELS_FILE, load_kernel_templates, render, render_files

PACKAGE = "loka_record_kernels"
FEW_ROWS = 256  # of the first call


class Kernels:
    """The module of the kernels of these parts, in a folder that is there for the time of measuring."""

    def __init__(self, parts: Sequence[Part], folder: Path) -> None:
        specs = list(dict.fromkeys(spec for part in parts for spec in _specs(part)))
        self._folder = folder
        self._parts = parts
        package = folder / PACKAGE
        package.mkdir()
        templates = load_kernel_templates()
        files = render_files([render(spec, templates) for spec in specs], templates, "loka bench kernels")
        for name, text in {**files, "__init__.py": ""}.items():
            (package / name).write_text(text, encoding="utf-8")

    def module(self) -> ModuleType:
        """The kernels' host functions."""
        return load(self._folder)

    def compile(self, jobs: int, progress: Progress) -> None:
        """Compile each kernel in one of `jobs` processes; what does not compile is told, and fails again later."""
        first: dict[tuple[object, ...], Part] = {}
        for part in self._parts:
            if specs := _specs(part):
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
    """The kernels' module of a folder."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    return importlib.import_module(f"{PACKAGE}.{KERNELS_FILE.removesuffix('.py')}")


def compile_parts(folder: str, parts: Sequence[Part]) -> list[str]:
    """Call each part's kernels once, in a process of its own; a line for each that cannot be."""
    producers = Producers(lambda: load(Path(folder)))
    failures = []
    for part in parts:
        few = Part(part.work, part.kernel, FEW_ROWS, part.columns, 0, part.dtype, part.recipe, part.around)
        try:
            prepared = producers.prepare(few)
            prepared.call(*prepared.arguments)
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001  (a compiler's or a driver's: it is told, and the others are compiled)
            failures.append(f"{part}: {describe(error)}")
    return failures


def _specs(part: Part) -> tuple[Spec, ...]:
    """A part's kernels; none for a GEMM, nor where no kernel is rendered for it, which its measurement will tell."""
    if part.work is Work.GEMM:
        return ()
    with contextlib.suppress(LokaError):
        return specs_of(part)
    return ()
