"""The timing of steps, regions and kernels: replays of a CUDA graph, and turns of plain loops.

What is judged by its kernels alone is captured and replayed: a time is the median of replays. Whole steps take turns,
since the host's speed varies within a minute: only what ran side by side is compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from loka.bench.device import BenchDevice
from loka.devices.targets import DEFAULT
from loka.errors import InputError

SEED = 0  # of what is measured
MEASURED_MS = 150  # of replays
LAUNCHES = 8  # least number in a graph of a single kernel
STEPS = 10  # of each kind in a turn
TURN_WARM_UPS = 2  # at the start of a turn: caches are of the variant before
ROUNDS = 8

Step = Callable[[], object]
Clock = Callable[[], float]  # seconds
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one step or one call."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int


def time_step(step: Step, measured: int = MEASURED_MS, device: BenchDevice | None = None) -> Timing:
    """Time one step from a CUDA graph."""
    device = device or BenchDevice()
    return time_replays(device.capture(step), measured, device)


def time_replays(replay: Step, measured: int, device: BenchDevice) -> Timing:
    """Time a captured step."""
    return summarise([1e3 * each for each in device.replays(replay, measured)])


def time_call(call: Callable[..., Any], sets: Sequence[Sequence[Any]], device: BenchDevice | None = None) -> Timing:
    """Time one call, from a graph of at least LAUNCHES calls that cycle through the sets of arguments."""
    device = device or BenchDevice()
    launches = max(LAUNCHES, len(sets))
    kept: list[Any] = []  # results are kept, so that each call writes to its own memory

    def all_launches() -> None:
        kept[:] = [call(*sets[index % len(sets)]) for index in range(launches)]

    times = device.replays(device.capture(all_launches), MEASURED_MS)
    return summarise([1e3 * each / launches for each in times])


def rotations(bytes_of_one: int, cache: int = DEFAULT.l2_bytes) -> int:
    """Number of argument sets that together exceed twice the cache; at least two."""
    return max(2, 2 * cache // max(bytes_of_one, 1) + 1)


def size_of(arguments: Sequence[object]) -> int:
    """Bytes of the tensors among some arguments, and in lists among them."""
    flat = [value for each in arguments for value in (each if isinstance(each, list) else [each])]
    return sum(value.numel() * value.element_size() for value in flat if isinstance(value, Tensor))


def summarise(samples_us: Sequence[float]) -> Timing:
    """Median, 10th and 90th percentile (linear between samples). Raises InputError without samples."""
    if not samples_us:
        raise InputError("nothing was timed: there are no samples")
    if len(samples_us) == 1:
        return Timing(samples_us[0], samples_us[0], samples_us[0], 1)
    tenths = statistics.quantiles(samples_us, n=10, method="inclusive")
    return Timing(statistics.median(samples_us), tenths[0], tenths[-1], len(samples_us))


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
