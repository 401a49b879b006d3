"""Updates of trackers as CUDA graphs: an update is some eighty small kernels, which take less time than their launches.

All graphs of a Probe share memory for intermediate tensors, so they run one after another, on a separate stream:
concurrently with the user's forward and backward, whose large kernels leave room for small ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MOST = 512  # graphs of a device; for models with more operands, launches matter less


class Replays:
    """The graphs of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Updates of equal shapes share their input tensors.
        self._inputs: dict[tuple[torch.Size, torch.Size], tuple[Tensor, Tensor]] = {}
        self._captured = 0

    @property
    def full(self) -> bool:
        """True if another graph would cost more memory than it is worth."""
        return self._captured >= MOST

    def capture(self, update: Callable[[Tensor, Tensor], None], first: Tensor, second: Tensor) -> GraphReplay:
        """Captures `update(first, second)` as a graph, without running it. Handles and kernels must exist already.

        Waits for the device: call it outside training steps.
        """
        shapes = (first.shape, second.shape)
        first, second = self._inputs.setdefault(shapes, (torch.zeros_like(first), torch.zeros_like(second)))
        self._captured += 1
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            update(first, second)
        return GraphReplay(self, graph, first, second)

    @contextmanager
    def beside(self, *tensors: Tensor) -> Iterator[None]:
        """Work queued inside runs beside the current stream, after what that has queued; it reads `tensors`."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in tensors:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make the current stream wait for all updates so far."""
        torch.cuda.current_stream(self.device).wait_stream(self._stream)


class Replayed(ABC):
    """A tracker whose update of usual shapes may be a graph."""

    _replay: GraphReplay | None = None

    @abstractmethod
    def _take(self, first: Tensor, second: Tensor) -> None:
        """Queue an update, without waiting for the device."""

    def _run(self, first: Tensor, second: Tensor, after: Callable[[], None]) -> None:
        """Queue the update, by its graph where that fits, then the work that `after` queues."""
        if self._replay is not None and self._replay.fits(first, second):
            self._replay.run(first, second, after)
        else:
            self._settle()
            self._take(first, second)
            after()

    def _settle(self) -> None:
        """Make the current stream wait for the graphs' work."""
        if self._replay is not None:
            self._replay.join()


class GraphReplay:
    """One captured update, and its input tensors."""

    def __init__(self, replays: Replays, graph: torch.cuda.CUDAGraph, first: Tensor, second: Tensor) -> None:
        self._replays = replays
        self.graph = graph
        self.first = first
        self.second = second

    def fits(self, first: Tensor, second: Tensor) -> bool:
        """True if an update of these shapes can be replayed."""
        return first.shape == self.first.shape and second.shape == self.second.shape

    def run(self, first: Tensor, second: Tensor, after: Callable[[], None]) -> None:
        """Queue the update with these values, then the work that `after` queues."""
        with self._replays.beside(first, second):
            self.first.copy_(first)
            self.second.copy_(second)
            self.graph.replay()
            after()

    def join(self) -> None:
        """Make the current stream wait for all updates so far."""
        self._replays.join()
