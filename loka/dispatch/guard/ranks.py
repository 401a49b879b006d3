"""What ranks that train together agree on, by collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Ranks:
    """The ranks that check together: those of `group`, or all where torch.distributed is initialised."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group

    def first(self, found: tuple[str, str] | None) -> tuple[str, str] | None:
        """What the first rank that found something found; collective."""
        if not self._several():
            return found
        everyone: list[tuple[str, str] | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, found, group=self._group)
        return next((each for each in everyone if each is not None), None)

    def _several(self) -> bool:
        return dist.is_available() and dist.is_initialized()

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks, inf where it is not finite on one; collective."""
        finite = [value if math.isfinite(value) else math.inf for value in values]
        if not values or not self._several():
            return finite
        nccl = "nccl" in dist.get_backend(self._group)
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else None
        packed = torch.tensor(finite, dtype=torch.float64, device=device)
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=self._group)
        return packed.tolist()
