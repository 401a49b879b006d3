"""Timing of one kernel by a CUDA graph, in a few milliseconds, because a recording measures thousands of parts.

A graph holds several launches, each with its own arguments and results. Before each replay more than the L2 cache is
read, so that even small arguments come from memory; writing instead would charge the launches for the write-back of
dirty lines. Graphs are captured by hand: torch's context manager empties the allocator's cache each time, which costs
more than the measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loka.bench.machine import device_here
from loka.bench.record.check_numbers import results_of
from loka.bench.timing import rotations, size_of
from loka.errors import InputError
from loka.gc import deferred_gc

MOST_SETS = 32  # sets of arguments
LEAST_LAUNCHES = 8  # in a graph: they share the 3 us or so that starting a replay takes
LARGE = 256 * 2**20  # bytes moved by a launch from which two launches are enough
WARM_UPS = 2  # eager calls before a capture
MEASURED_US = 12_000  # of replays
LEAST_SAMPLES, MOST_SAMPLES = 5, 15
HELD_MEMORY = 48 * 2**30  # bytes that the allocator may keep between two parts

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Span:
    """Time of one call: median in microseconds, half the interquartile range relative to it, number of samples."""

    us: float
    spread: float
    runs: int


Timer = Callable[[Call, Sequence[Any]], Span]  # times a call on these arguments, or on copies of them


class GraphClock:
    """Clock of the current CUDA device, by graph replays."""

    def __init__(self) -> None:
        self._cache = torch.zeros(device_here().l2_bytes, dtype=torch.float32, device="cuda")  # four times the cache
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def time(self, call: Call, arguments: Sequence[Any]) -> Span:
        """Capture launches on copies of the arguments, and replay them. Errors of the call propagate."""
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
        kept: list[Any] = []  # results are kept, so that each launch writes to its own memory
        self._stream.wait_stream(torch.cuda.current_stream())
        # Garbage collection of other graphs and compiled kernels could abort a capture.
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
        """Microseconds per launch, one sample for each replay."""
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
    """Number of argument sets and of launches for a call that reads and writes `moved` bytes."""
    count = min(rotations(moved, device_here().l2_bytes), MOST_SETS)
    return count, count if moved >= LARGE else max(count, LEAST_LAUNCHES)


def span_of(samples: Sequence[float]) -> Span:
    """Median and spread of times in microseconds, or of speed-ups. Raises InputError for fewer than two."""
    if len(samples) < 2:
        raise InputError(f"{len(samples)} timings of a kernel say nothing about their spread; two are needed")
    median = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Span(median, (high - low) / 2 / median if median > 0 else 0.0, len(samples))


def copy_of(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments, tensors cloned."""
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in arguments)


def result_bytes(result: object) -> int:
    """Bytes of the tensors in a call's result."""
    return size_of(results_of(result))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
