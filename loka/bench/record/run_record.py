"""`loka bench kernels --record FILE`: choose parts, compile them and measure them on this machine's GPU."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from loka.bench.machine import environment
from loka.bench.record.clock import GraphClock
from loka.bench.record.compiled_kernels import CompiledKernels
from loka.bench.record.gemm_parts import Gemms
from loka.bench.record.grid import PARTS, grid
from loka.bench.record.interaction_parts import InteractionParts
from loka.bench.record.producer_parts import Producers
from loka.bench.record.record import AllParts, Store, Tally, in_order, record
from loka.bench.timing import Progress
from loka.kernels.gemm.catalogue import GEMM_KERNELS
from loka.kernels.measurements.parts import Part, PartCosts, PartTime, TimeSource
from loka.mods.policy_loader import load_policy
from loka.plan.examine import assumed_safe, examine
from loka.plan.plan_of import plan_of

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


def run_record(
    store: Store, parts: Sequence[Part], progress: Progress, seconds: float = float("inf"), jobs: int = 0
) -> Tally:
    """Compile in `jobs` processes (0: by the CPUs) and measure what is missing from the store, for `seconds` at most.

    Raises LokaError if a kernel has broken the device.
    """
    start = time.monotonic()
    left = [part for part in in_order(parts) if not store.has(part)]
    progress(f"{environment()}\n{len(left)} of {len(parts)} parts are to be measured")
    with tempfile.TemporaryDirectory(prefix="loka-record-") as folder:
        kernels = CompiledKernels(left, Path(folder))
        kernels.compile(jobs or min(os.cpu_count() or 1, MOST_JOBS), progress)
        progress(f"compiled after {time.monotonic() - start:.0f} s")
        ours = Producers(kernels.module), InteractionParts(kernels.module)
        bench = AllParts(Gemms(), *ours)
        tally = record(parts, store, bench, GraphClock(), progress, seconds - (time.monotonic() - start))
    progress(f"{tally}, in {time.monotonic() - start:.0f} s")
    return tally


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
