"""The collectives of a step: how many bytes they move, how long NCCL works, and how long they take by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from loka.bench.device import BenchDevice
from loka.bench.timing import timed_turn

FUNCTIONS = {  # of torch.distributed, by which FSDP2 starts them; the names depend on torch's version
    "all-gather": ("all_gather_into_tensor", "all_gather_single"),
    "reduce-scatter": ("reduce_scatter_tensor", "reduce_scatter_single"),
}
PROFILED = 2  # steps


@dataclass(frozen=True, slots=True)
class CollectiveFigures:
    """All collectives of one kind in a step. `bare_ms`: the same ones in a row, with nothing beside them."""

    kind: str  # all-gather, reduce-scatter or all-reduce
    calls: int
    nbytes: int  # of the whole tensors, on one rank
    bare_ms: float


class Collectives:
    """The collectives that FSDP2 starts, with their sizes."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, Callable[..., Any], int, int, torch.dtype]] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Context that notes what is started inside."""
        own = {name: getattr(dist, name) for names in FUNCTIONS.values() for name in names if hasattr(dist, name)}

        def noting(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                out, given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)][:2]
                self._seen.append((kind, function, out.numel(), given.numel(), out.dtype))
                return function(*args, **kwargs)

            return call

        for kind, names in FUNCTIONS.items():
            for name in names:
                if name in own:
                    setattr(dist, name, noting(kind, own[name]))
        try:
            yield
        finally:
            for name, function in own.items():
                setattr(dist, name, function)

    def figures(self, device: BenchDevice, steps: int) -> tuple[CollectiveFigures, ...]:
        """Sizes and times by kind; collective, and each rank has to have seen the same."""

        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device.type)

        found = []
        for kind in FUNCTIONS:
            seen = [each[1:] for each in self._seen if each[0] == kind]
            calls = [(function, zeros(out, dtype), zeros(given, dtype)) for function, out, given, dtype in seen]
            if calls:
                nbytes = sum(max(out.nbytes, given.nbytes) for _, out, given in calls)
                found.append(CollectiveFigures(kind, len(calls), nbytes, _timed(partial(_all, calls), device, steps)))
        return tuple(found)


def _all(calls: Iterable[tuple[Callable[..., Any], Tensor, Tensor]]) -> None:
    for function, out, given in calls:
        function(out, given)


def all_reduces(gradients: Iterable[Tensor], device: BenchDevice, steps: int) -> CollectiveFigures:
    """The all-reduces of all gradients, tensor by tensor; collective. DDP joins them into buckets."""
    buffers = [torch.zeros_like(each) for each in gradients]

    def run() -> None:
        for buffer in buffers:
            dist.all_reduce(buffer)

    nbytes = sum(each.nbytes for each in buffers)
    return CollectiveFigures("all-reduce", len(buffers), nbytes, _timed(run, device, steps))


def _timed(run: Callable[[], object], device: BenchDevice, steps: int) -> float:
    dist.barrier()
    return timed_turn(run, device.wait, steps=steps).step_ms


def nccl_times(step: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of a step in which NCCL's kernels run, waiting for other ranks included, and those of them in which
    nothing else runs. Collective.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    spans = [
        ("nccl" in event.name.lower(), event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)  # these are ranges
    ]
    total, exposed = total_and_exposed(spans)
    return total / 1e3 / PROFILED, exposed / 1e3 / PROFILED


def total_and_exposed(spans: Iterable[tuple[bool, float, float]]) -> tuple[float, float]:
    """How long some kernel of NCCL ran, and how long no other ran meanwhile.

    `spans`: of each kernel whether it is NCCL's, its start and its end.
    """
    edges = sorted((time, nccl, change) for nccl, *ends in spans for time, change in zip(ends, (1, -1), strict=True))
    running = {True: 0, False: 0}
    total = exposed = before = 0.0
    for time, nccl, change in edges:
        if running[True]:
            total += time - before
            exposed += 0.0 if running[False] else time - before
        running[nccl] += change
        before = time
    return total, exposed
