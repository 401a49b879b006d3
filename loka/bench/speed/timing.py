"""GPU timing: median and spread of replays of a CUDA graph, in microseconds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from loka.devices.targets import DEFAULT
from loka.errors import InputError

WARM_UPS = 3  # eager runs before a capture
WARM_UP_MS, MEASURED_MS = 20, 150  # of replays
LAUNCHES = 8  # least number in a graph of a single kernel


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one step or one call."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int


class Timer(Protocol):
    """Captures steps and times their replays."""

    def capture(self, step: Callable[[], object]) -> Callable[[], None]:
        """Capture a step; returns a function that replays it."""
        ...

    def milliseconds(self, replay: Callable[[], None], measured: int) -> list[float]:
        """Time of each replay, for about `measured` milliseconds in all."""
        ...


@dataclass(frozen=True, slots=True)
class TimedReplay:
    """Replays a captured step. It keeps the step alive: a graph reads the step's tensors without owning them."""

    graph: torch.cuda.CUDAGraph
    step: Callable[[], object]

    def __call__(self) -> None:
        self.graph.replay()


class GraphTimer:
    """CUDA graphs, timed by Triton's do_bench, which overwrites the L2 cache between two replays."""

    def capture(self, step: Callable[[], object]) -> Callable[[], None]:
        """A CUDA graph of one step, after eager runs on a side stream."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return TimedReplay(graph, step)

    def milliseconds(self, replay: Callable[[], None], measured: int) -> list[float]:
        """Time between CUDA events around each replay."""
        from triton.testing import do_bench

        return [float(time) for time in do_bench(replay, warmup=WARM_UP_MS, rep=measured, return_mode="all")]


GRAPHS = GraphTimer()


def time_step(step: Callable[[], object], measured: int = MEASURED_MS, timer: Timer = GRAPHS) -> Timing:
    """Time one step from a CUDA graph."""
    return summarise([1e3 * time for time in timer.milliseconds(timer.capture(step), measured)])


def time_call(call: Callable[..., Any], sets: Sequence[Sequence[Any]], timer: Timer = GRAPHS) -> Timing:
    """Time one call, from a graph of at least LAUNCHES calls that cycle through the sets of arguments."""
    launches = max(LAUNCHES, len(sets))
    kept: list[Any] = []  # results are kept, so that each call writes to its own memory

    def all_launches() -> None:
        kept[:] = [call(*sets[index % len(sets)]) for index in range(launches)]

    times = timer.milliseconds(timer.capture(all_launches), MEASURED_MS)
    return summarise([1e3 * time / launches for time in times])


def rotations(bytes_of_one: int, cache: int = DEFAULT.l2_bytes) -> int:
    """Number of argument sets that together exceed twice the cache; at least two."""
    return max(2, 2 * cache // max(bytes_of_one, 1) + 1)


def size_of(arguments: Sequence[object]) -> int:
    """Bytes of the tensors among some arguments."""
    return sum(value.numel() * value.element_size() for value in arguments if isinstance(value, Tensor))


def summarise(samples_us: Sequence[float]) -> Timing:
    """Median, 10th and 90th percentile (linear between samples). Raises InputError without samples."""
    if not samples_us:
        raise InputError("nothing was timed: there are no samples")
    ordered = sorted(samples_us)
    return Timing(statistics.median(ordered), _quantile(ordered, 0.1), _quantile(ordered, 0.9), len(ordered))


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
