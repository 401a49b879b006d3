"""Run the units of an ablation: prepared side by side, each in its own process, and timed one at a time.

A group of units compiles, runs and captures at the same time. Once all of the group are ready or have failed, each is
timed while the others wait, so that nothing else uses the device. A process that crashes loses only its own unit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

from benchmarks.ablation.ablation_unit import Mode, PreparedUnit, RunSettings, UnitOutcome, in_a_process
from benchmarks.ablation.rows_columns import Unit
from loka.bench.child_processes import ChildProcess, child_processes
from loka.bench.timing import Progress

MOST_JOBS = 6  # processes: each holds a captured step of the model in the device's memory
OUT_OF_MEMORY = "OutOfMemoryError"


def default_jobs(device: str) -> int:
    """Default number of units that are prepared side by side."""
    return max(1, min(MOST_JOBS, (os.cpu_count() or 1) // 2)) if device == "cuda" else 1


def run_units(
    units: Sequence[Unit], wanted: RunSettings, jobs: int, seconds: float, progress: Progress
) -> Iterator[tuple[Unit, UnitOutcome]]:
    """Measure units in this order and yield each as soon as it is done; units after `seconds` are left out.

    With one job everything runs in this process.
    """
    end = time.monotonic() + seconds
    for first in range(0, len(units), jobs):
        group = units[first : first + jobs]
        if time.monotonic() >= end:
            progress(f"no time is left for {', '.join(unit.label for unit in units[first:])}")
            return
        progress(f"preparing {'; '.join(unit.label for unit in group)}")
        for unit, outcome in _group(group, wanted, jobs, end, progress):
            progress(f"{unit.label}: {words(outcome)}")
            yield unit, outcome


def words(outcome: UnitOutcome) -> str:
    """An outcome on one line of progress, so that an interrupted run has still reported it."""
    parts = [f"{mode} {_describe_mode(found)}" for mode, found in outcome.modes.items()]
    if outcome.loss is not None:
        parts.append(f"log loss {outcome.loss.test:.5f} after {outcome.loss.steps} steps")
    parts += [f"{what or 'all'} failed: {why}" for why, what in outcome.reasons.items()]
    return f"{'; '.join(parts)}; in {outcome.seconds:.0f} s"


def _describe_mode(found: Mode) -> str:
    text = f"{found.timing.median_us:.1f} us"
    text += f", peak {found.peak_mib:.0f} MiB" if found.peak_mib is not None else ""
    text += f", {found.launches} kernels" if found.launches is not None else ""
    return text + (f", {found.output_db:.1f} dB" if found.output_db is not None else "")


def _group(
    group: Sequence[Unit], wanted: RunSettings, jobs: int, end: float, progress: Progress
) -> Iterator[tuple[Unit, UnitOutcome]]:
    if jobs == 1:
        for unit in group:
            yield unit, PreparedUnit(unit, wanted, progress).finish()
        return
    threads = max(1, (os.cpu_count() or 1) // len(group))
    crowded = []
    with child_processes() as start:
        children = [(unit, start(in_a_process, unit, wanted, threads)) for unit in group]
        for _, child in children:
            child.received(end)  # its unit is captured, it has failed, or the time is up
        for unit, child in children:
            outcome = _outcome(child, end)
            if len(group) > 1 and any(OUT_OF_MEMORY in why for why in outcome.failures.values()):
                crowded.append(unit)  # tried again alone: the others took the memory
                continue
            yield unit, outcome
    for unit in crowded:
        yield from _group((unit,), wanted, jobs, end, progress)


def _outcome(child: ChildProcess, end: float) -> UnitOutcome:
    """Let a process time its unit and return the result."""
    if not child.failure:
        child.channel.send("go")
        found = child.received(end)
        if isinstance(found, UnitOutcome):
            return found
    return UnitOutcome({}, None, {"": child.failure}, 0.0)
