"""Microseconds of one kernel's work from a CUDA graph, in a few milliseconds: thousands of parts are measured in a row.

A graph holds several launches, each on arguments and results of its own. Before each replay more than the L2 cache is
read, so that every launch finds its arguments in memory, however small they are; were it written, launches would pay
for writing those lines back. Graphs are captured by hand: the context manager of torch empties the allocator's cache
each time, which costs more than the measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from loka.bench.machine import device_here
from loka.bench.speed.timing import rotations, size_of
from loka.errors import InputError
from loka.gc import deferred_gc

MOST_SETS = 32  # sets of arguments
LEAST_LAUNCHES = 8  # in a graph: a replay's start of about 3 us is shared by them
LARGE = 256 * 2**20  # bytes of one launch from which two launches are enough
WARM_UPS = 2  # eager calls before a capture
MEASURED_US = 12_000  # of replays
LEAST_SAMPLES, MOST_SAMPLES = 5, 15
HELD_MEMORY = 48 * 2**30  # bytes that the allocator may keep between two parts

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Span:
    """Time of one call: the median in microseconds, half the distance of the quartiles as a share of it, samples."""

    us: float
    spread: float
    runs: int


class Clock(Protocol):
    """How a call is timed."""

    def time(self, call: Call, arguments: Sequence[Any]) -> Span:
        """Of one call on these arguments, or on copies of them."""
        ...


class GraphClock:
    """Times on the current CUDA device."""

    def __init__(self) -> None:
        self._cache = torch.zeros(device_here().l2_bytes, dtype=torch.float32, device="cuda")  # four times the cache
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def time(self, call: Call, arguments: Sequence[Any]) -> Span:
        """Capture launches on copies of the arguments, and replay them. What the call raises passes through."""
        moved = size_of(arguments) + result_bytes(call(*arguments))
        count, launches = counts(moved)
        sets = [tuple(arguments), *(copy_of(arguments) for _ in range(count - 1))]
        replay = self._capture(call, sets, launches)
        samples = self._samples(replay, launches)
        del replay, sets
        if torch.cuda.memory_reserved() > HELD_MEMORY:
            torch.cuda.empty_cache()
        return span_of(samples)

    def _capture(self, call: Call, sets: Sequence[tuple[Any, ...]], launches: int) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        kept: list[Any] = []  # results, so that each launch writes to memory of its own
        self._stream.wait_stream(torch.cuda.current_stream())
        # What garbage collection frees of other graphs and compiled kernels may end a capture.
        with torch.cuda.stream(self._stream), deferred_gc():
            for index in range(WARM_UPS):
                call(*sets[index % len(sets)])
            torch.cuda.synchronize()
            graph.capture_begin()
            try:
                for index in range(launches):
                    kept.append(call(*sets[index % len(sets)]))
            finally:
                graph.capture_end()
        return graph.replay

    def _samples(self, replay: Callable[[], None], launches: int) -> list[float]:
        """Microseconds of a launch, one for each replay."""
        (first,) = self._replays(replay, 1)
        number = min(max(int(MEASURED_US / max(first, 1.0)), LEAST_SAMPLES), MOST_SAMPLES)
        return [total / launches for total in self._replays(replay, number)]

    def _replays(self, replay: Callable[[], None], number: int) -> list[float]:
        events = [(_event(), _event()) for _ in range(number)]
        for start, end in events:
            self._cache.sum()
            start.record()
            replay()
            end.record()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in events]


def counts(moved: int) -> tuple[int, int]:
    """How many sets of arguments, and how many launches, for a call that reads and writes so many bytes."""
    count = min(rotations(moved, device_here().l2_bytes), MOST_SETS)
    return count, count if moved >= LARGE else max(count, LEAST_LAUNCHES)


def span_of(samples: Sequence[float]) -> Span:
    """Median and spread of microseconds. Raises InputError where there are fewer than two of them."""
    if len(samples) < 2:
        raise InputError(f"{len(samples)} timings of a kernel say nothing about their spread; two are needed")
    median = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Span(median, (high - low) / 2 / median if median > 0 else 0.0, len(samples))


def copy_of(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with tensors of their own."""
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in arguments)


def result_bytes(result: object) -> int:
    """Bytes of the tensors that a call gave back."""
    return size_of(result if isinstance(result, tuple | list) else (result,))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
