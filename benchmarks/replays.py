"""Times of what is judged by its kernels alone: captured into a CUDA graph, the median of replays."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from loka.bench.device import BenchDevice
from loka.bench.timing import Step
from loka.errors import InputError

MEASURED_MS = 150  # of replays


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


def summarise(samples_us: Sequence[float]) -> Timing:
    """Median, 10th and 90th percentile (linear between samples). Raises InputError without samples."""
    if not samples_us:
        raise InputError("nothing was timed: there are no samples")
    if len(samples_us) == 1:
        return Timing(samples_us[0], samples_us[0], samples_us[0], 1)
    tenths = statistics.quantiles(samples_us, n=10, method="inclusive")
    return Timing(statistics.median(samples_us), tenths[0], tenths[-1], len(samples_us))
