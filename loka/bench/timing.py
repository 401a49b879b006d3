"""Microseconds on a GPU: the median and the spread of replays of a CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from loka.errors import InputError

L2_BYTES = 50 * 2**20  # of an H100
WARM_UPS = 3  # eager runs before a capture
WARM_UP_MS, MEASURED_MS = 20, 150  # of replays, as Triton's do_bench takes them
LAUNCHES = 8  # in a graph of a single kernel, at least
SAMPLES, DISCARDED = 40, 5


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one step or one call."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int


class Clock(Protocol):
    """Times something that a device does."""

    def milliseconds(self, run: Callable[[], None]) -> float:
        """From before `run` to after what it started."""
        ...


class EventClock:
    """CUDA events on the current stream."""

    def milliseconds(self, run: Callable[[], None]) -> float:
        """Waits for the device to be done before and after."""
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))


def summarise(samples_us: Sequence[float]) -> Timing:
    """Median, 10th and 90th percentile (linear between samples). Raises InputError without samples."""
    if not samples_us:
        raise InputError("nothing was timed: no samples")
    ordered = sorted(samples_us)
    return Timing(statistics.median(ordered), _quantile(ordered, 0.1), _quantile(ordered, 0.9), len(ordered))


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def capture(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one step, after eager runs on a stream of their own."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def time_step(step: Callable[[], object], milliseconds: int = MEASURED_MS) -> Timing:
    """One step from a CUDA graph; the L2 cache is overwritten between two replays (Triton's do_bench)."""
    from triton.testing import do_bench

    graph = capture(step)
    times = do_bench(graph.replay, warmup=WARM_UP_MS, rep=milliseconds, return_mode="all")
    return summarise([1e3 * float(time) for time in times])


def rotations(bytes_of_one: int, cache: int = L2_BYTES) -> int:
    """How many sets of arguments, used in turn, are more than twice the cache; at least two."""
    return max(2, 2 * cache // max(bytes_of_one, 1) + 1)


def size_of(arguments: Sequence[object]) -> int:
    """Bytes of the tensors among some arguments."""
    return sum(value.numel() * value.element_size() for value in arguments if isinstance(value, Tensor))


def time_call(call: Callable[..., Any], sets: Sequence[Sequence[Any]], clock: Clock | None = None) -> Timing:
    """One call, from a graph of calls on each set of arguments in turn, none of which the L2 cache still holds."""
    launches = max(LAUNCHES, len(sets))
    kept: list[Any] = []

    def all_launches() -> None:
        kept[:] = [call(*sets[index % len(sets)]) for index in range(launches)]

    graph = capture(all_launches)
    return summarise(repeat(graph.replay, clock or EventClock(), launches))


def repeat(run: Callable[[], None], clock: Clock, launches: int) -> list[float]:
    """Microseconds of one of the `launches` that `run` makes, time after time; the first times are left out."""
    times = [1e3 * clock.milliseconds(run) / launches for _ in range(DISCARDED + SAMPLES)]
    return times[DISCARDED:]
