"""What ranks that train together agree on, by collectives."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from loka.dispatch.bind.bound import Bound, derived_class
from loka.dispatch.bind.unplanned import few
from loka.dispatch.bound_state import BoundModule
from loka.dispatch.dispatch_errors import BindError
from loka.errors import Code

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
_SHOWN = 8  # digits of a stamp


class Ranks:
    """The ranks of a group, None being all, or of the groups of a mesh; this one alone without torch.distributed."""

    def __init__(self, *groups: ProcessGroup | None) -> None:
        self._groups = groups
        self._several = dist.is_available() and dist.is_initialized()

    def everyone(self, mine: T) -> dict[int, T]:
        """What each rank says, by its number among all; collective."""
        said = {dist.get_rank() if self._several else 0: mine}
        for group in self._groups if self._several else ():
            parts: list[dict[int, T]] = [{} for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(parts, said, group=group)
            said = {rank: each for part in parts for rank, each in part.items()}
        return dict(sorted(said.items()))

    def first(self, found: tuple[str, str] | None) -> tuple[str, str] | None:
        """What the first rank that found something found, with the rank if there are several; collective."""
        said = self.everyone(found)
        for rank, each in said.items():
            if each is not None:
                return each if len(said) == 1 else (each[0], f"{each[1]}, on rank {rank}")
        return None

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks, inf where it is not finite on one; collective."""
        finite = [value if math.isfinite(value) else math.inf for value in values]
        if not values or not self._several:
            return finite
        (group,) = self._groups
        nccl = "nccl" in dist.get_backend(group)
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else None
        packed = torch.tensor(finite, dtype=torch.float64, device=device)
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=group)
        return packed.tolist()


def require_same(package: str, bound: Sequence[tuple[BoundModule, Bound]], ranks: Ranks) -> None:
    """Raise BindError, on every rank, unless all have bound the same package in the same mode to the same sites."""
    homes = sorted({derived_class(type(module)).loka_generated.__module__ for _, module in bound})
    stamps = tuple(str(getattr(sys.modules[home], "STAMP", home)) for home in homes)
    modes = tuple(sorted({each.counters.mode for each, _ in bound}))
    sites = tuple(site for each, _ in bound for site in each.counters.sites)
    said = ranks.everyone((stamps, modes, sites))
    alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for rank, each in said.items():
        alike.setdefault(each, []).append(str(rank))
    if len(alike) == 1:
        return
    every = dict.fromkeys(site for _, _, sites in alike for site in sites)
    problems = []
    for (stamps, modes, sites), numbers in alike.items():
        generations = ", ".join(stamp[:_SHOWN] for stamp in stamps)
        has = f"generation {generations} in mode {', '.join(modes)}" if stamps else "nothing"
        lacks = [site for site in every if site not in sites]
        without = f", without {few(lacks)}" if lacks else ""
        problems.append(f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}: {has}{without}")
    raise BindError(
        f"{package}: ranks that train together have bound different things: give all of them the folder of one "
        "generation (STAMP in its __init__.py), and call apply and keep alike on every rank:",
        Code.RANKS,
        problems,
    )
