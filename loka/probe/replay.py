"""Updates of trackers as CUDA graphs: an update is some eighty small kernels, which take less time than their launches.

All graphs of a Probe share their memory for what lies between, so they run one after another, on whatever streams the
user's forward and backward run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MOST = 512  # graphs of a device; models with more operands than that are large, and their steps take longer


class Replays:
    """The graphs of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._inputs: dict[
            tuple[torch.Size, torch.Size], tuple[Tensor, Tensor]
        ] = {}  # shared by updates of like shapes
        self._captured = 0

    @property
    def full(self) -> bool:
        """Whether there are so many graphs that another one would cost more memory than it is worth."""
        return self._captured >= MOST

    def capture(self, update: Callable[[Tensor, Tensor], None], first: Tensor, second: Tensor) -> Replay:
        """`update(first, second)` as a graph; it is not run now. What it needs once (handles, kernels) must be there.

        Waits for the device: call it outside of training steps.
        """
        shapes = (first.shape, second.shape)
        first, second = self._inputs.setdefault(shapes, (torch.zeros_like(first), torch.zeros_like(second)))
        self._captured += 1
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            update(first, second)
        return Replay(self, graph, first, second)

    def run(self, replay: Replay, first: Tensor, second: Tensor) -> None:
        """Queue an update on the current stream, after the one before it."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self._done)
        replay.first.copy_(first)
        replay.second.copy_(second)
        replay.graph.replay()
        self._done.record(stream)


class Replay:
    """One captured update, and the tensors that it reads."""

    def __init__(self, replays: Replays, graph: torch.cuda.CUDAGraph, first: Tensor, second: Tensor) -> None:
        self._replays = replays
        self.graph = graph
        self.first = first
        self.second = second

    def fits(self, first: Tensor, second: Tensor) -> bool:
        """Whether an update of these shapes can be replayed."""
        return first.shape == self.first.shape and second.shape == self.second.shape

    def run(self, first: Tensor, second: Tensor) -> None:
        """Do the update with these values."""
        self._replays.run(self, first, second)
