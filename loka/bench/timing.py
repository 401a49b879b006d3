"""The timing of whole steps: in turns, as the speed of a host varies; what ran side by side is compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from loka.devices.targets import DEFAULT

SEED = 0  # of what is measured
STEPS = 10  # of each kind in a turn
TURN_WARM_UPS = 2  # at the start of a turn: caches are of the variant before
ROUNDS = 8

Step = Callable[[], object]
Clock = Callable[[], float]  # seconds
Progress = Callable[[str], None]


def rotations(bytes_of_one: int, cache: int = DEFAULT.l2_bytes) -> int:
    """Number of argument sets that together exceed twice the cache; at least two."""
    return max(2, 2 * cache // max(bytes_of_one, 1) + 1)


def size_of(arguments: Sequence[object]) -> int:
    """Bytes of the tensors among some arguments, and in lists among them."""
    flat = [value for each in arguments for value in (each if isinstance(each, list) else [each])]
    return sum(value.numel() * value.element_size() for value in flat if isinstance(value, Tensor))


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
    for _ in range(TURN_WARM_UPS):
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
