"""`loka bench kernels --record FILE`: choose parts, compile them and measure them on this machine's GPU."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch
from torch._inductor import config as inductor

from loka.bench.device import describe
from loka.bench.machine import environment, require_gpu
from loka.bench.packages import Workshop
from loka.bench.record.clock import GraphClock
from loka.bench.record.grid import PARTS, grid
from loka.bench.record.interaction_parts import specs_of as interaction_specs
from loka.bench.record.producer_parts import specs_of
from loka.bench.record.record import Tally, all_parts, in_order, record
from loka.bench.timing import Progress
from loka.errors import LokaError
from loka.kernels.fused.rendering import AnySpec
from loka.kernels.gemm.catalogue import GEMM_KERNELS
from loka.kernels.measurements.interaction_forms import BACKWARDS, family
from loka.kernels.measurements.lookup import Recording, Versions
from loka.kernels.measurements.parts import COMPILED, INTERACTIONS, Part, PartCosts, PartKind, PartTime, TimeSource
from loka.mods.policy_loader import load_policy
from loka.plan.examine import assumed_safe, examine
from loka.plan.plan_of import plan_of

FEW_ROWS = 256  # of the call by which a kernel is compiled
MOST_JOBS = 12


def libraries() -> dict[str, str]:
    """Kernel name -> version of its library, for installed libraries."""
    found = {kernel.name: kernel.library.version() for kernel in GEMM_KERNELS if kernel.library is not None}
    return {kernel: version for kernel, version in found.items() if version is not None}


def parts_of(works: Sequence[str], policy: Path | None = None) -> tuple[Part, ...]:
    """The parts of these kinds (none named: all) in the shipped grid, or those that a policy's sites need.

    Kernels whose library is not installed are left out. Raises InputError for an unknown kind, and those of planning.
    """
    known = libraries()
    others = [kernel.name for kernel in GEMM_KERNELS if kernel.operator is not None and kernel.name in known]
    chosen = grid(works or PARTS, others)
    if policy is None:
        return chosen
    missing = {kernel.name for kernel in GEMM_KERNELS if kernel.library is not None and kernel.name not in known}
    wanted = (part for part in parts_of_policy(policy) if part.kernel not in missing)
    return tuple(part for part in wanted if not works or part.work in works)


def record_into(
    file: Path, works: Sequence[str], policy: Path | None, progress: Progress, seconds: float, jobs: int
) -> Tally:
    """Measure the parts of these kinds that are missing from a file, of the shipped grid or of a policy's sites.

    Raises InputError for an unknown kind, for a damaged file, and without a GPU, and as `run_record`.
    """
    parts = parts_of(works, policy)
    require_gpu()
    with Recording(file, Versions.here(), libraries()) as recording:
        tally = run_record(recording, parts, progress, seconds, jobs)
        if tally.measured + tally.known + tally.failed < len(set(parts)):
            recording.stopped_early()
    return tally


def run_record(store: Recording, parts: Sequence[Part], progress: Progress, seconds: float, jobs: int) -> Tally:
    """Compile in `jobs` processes (0: by the CPUs) and measure what is missing from the store, for `seconds` at most.

    Raises LokaError if a kernel has broken the device.
    """
    start = time.monotonic()
    left = [part for part in in_order(parts) if not store.has(part)]
    progress(f"{environment()}\n{len(left)} of {len(parts)} parts are to be measured")
    with Workshop() as workshop:
        module = workshop.kernels(rendered(left))
        compile_ahead(left, workshop.folder, jobs or min(os.cpu_count() or 1, MOST_JOBS), progress)
        progress(f"compiled after {time.monotonic() - start:.0f} s")
        left_s = seconds - (time.monotonic() - start)
        tally = record(parts, store, all_parts(module), GraphClock().time, progress, left_s)
    progress(f"{tally}, in {time.monotonic() - start:.0f} s")
    return tally


def rendered(parts: Iterable[Part]) -> tuple[AnySpec, ...]:
    """The specs of the rendered kernels of these parts, once each."""
    return tuple(dict.fromkeys(spec for part in parts for spec in _specs(part)))


def _specs(part: Part) -> tuple[AnySpec, ...]:
    """A part's kernels; none for a GEMM, nor for a part without a rendered kernel, which measuring reports."""
    if part.work is PartKind.GEMM or part.kernel == COMPILED:
        return ()
    with contextlib.suppress(LokaError):
        return interaction_specs(part) if part.work in INTERACTIONS else specs_of(part)
    return ()


def compile_ahead(parts: Sequence[Part], folder: Path, jobs: int, progress: Progress) -> None:
    """Compile each kernel in one of `jobs` processes; failures are reported, and occur again when measuring.

    Triton caches compiled kernels on disk, so that other processes can fill the cache: they call each kernel once, on
    few rows. `folder` is that of the Workshop with the rendered kernels.
    """
    first: dict[tuple[object, ...], Part] = {}
    # Backwards first: compiling a step compiles its forward too.
    for part in sorted(parts, key=lambda part: part.work not in BACKWARDS):
        if part.kernel == COMPILED:
            first.setdefault((replace(part, work=family(part.work)),), part)
        elif specs := _specs(part):
            first.setdefault((specs, part.dtype), part)
    wanted = list(first.values())
    if not wanted:
        return
    progress(f"compiling {len(wanted)} kernels in {jobs} processes")
    chunks = [wanted[start::jobs] for start in range(min(jobs, len(wanted)))]
    with ProcessPoolExecutor(len(chunks), get_context("spawn")) as pool:
        for failures in pool.map(compile_parts, [folder] * len(chunks), chunks):
            for failure in failures:
                progress(failure)


def compile_parts(folder: Path, parts: Sequence[Part]) -> list[str]:
    """Call each part's kernels once; returns a line for each failure. Runs in a child process."""
    inductor.compile_threads = 1  # there are many processes already
    failures = []
    with Workshop(folder) as workshop:
        prepare = all_parts(workshop.kernels())
        for part in parts:
            try:  # torch.compile specialises on the number of samples
                prepared = prepare(part if part.kernel == COMPILED else replace(part, rows=FEW_ROWS))
                prepared.call(*prepared.arguments)
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # for the other processes
            except Exception as error:  # noqa: BLE001  (of compiler or driver: reported, and the others still compile)
                failures.append(f"{part}: {describe(error)}")
    return failures


class RequestedParts(PartCosts):
    """Part costs that record each requested part and answer one microsecond."""

    def __init__(self) -> None:
        """Start without requests."""
        self.name, self.sha256 = "requested", ""
        self._parts: dict[Part, None] = {}

    def time(self, part: Part) -> PartTime | None:
        """Record the part; always one microsecond."""
        self._parts[part] = None
        return PartTime(1.0, 0.0, TimeSource.MEASURED)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The requested parts, in the order of the first requests."""
        return tuple(self._parts)


def parts_of_policy(path: str | os.PathLike[str]) -> tuple[Part, ...]:
    """The parts of every execution option of a policy's sites, at its batch size; any profile is ignored.

    Raises the InputErrors of planning.
    """
    examined = examine(load_policy(os.fspath(path)))
    requested = RequestedParts()
    plan_of(examined, assumed_safe(examined), requested)
    return requested.parts
