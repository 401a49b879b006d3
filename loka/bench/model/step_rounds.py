"""Timing of steps in turns: the host's speed varies within a minute, so only what ran side by side is compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

STEPS = 10  # of each kind in a round
WARM_UPS = 2  # at the start of a turn: caches are of the variant before
ROUNDS = 8

Step = Callable[[], object]
Clock = Callable[[], float]  # seconds


@dataclass(frozen=True, slots=True)
class RoundTiming:
    """One step in one round, in milliseconds."""

    step_ms: float  # of steps in a row, until the device is done, divided by their number
    host_ms: float  # until the call returns, with an empty queue: the median


def timed_turn(
    step: Step, wait: Callable[[], None], clock: Clock = time.perf_counter, steps: int | None = None
) -> RoundTiming:
    """One variant's turn in a round, of so many `steps` of each kind (None: STEPS). `wait` returns when the device is
    done.
    """
    steps = STEPS if steps is None else steps
    for _ in range(WARM_UPS):
        step()
    hosts = []
    for _ in range(steps):
        wait()
        start = clock()
        step()
        hosts.append(clock() - start)
    wait()
    start = clock()
    for _ in range(steps):
        step()
    wait()
    return RoundTiming(1e3 * (clock() - start) / steps, 1e3 * statistics.median(hosts))


def speedup(baseline: Sequence[RoundTiming], own: Sequence[RoundTiming]) -> float | None:
    """Median over the rounds of the baseline's step over the own one of the same round; None without common rounds."""
    ratios = [one.step_ms / other.step_ms for one, other in zip(baseline, own, strict=False)]
    return statistics.median(ratios) if ratios else None
