"""Merges the statistics of sites from runs and ranks exactly, as from one pass over all their rows.

Counts are added, maxima are the larger one, moments follow Chan's formula in float64 (moments.merge). A weight is a
state at one step, not a sum over rows: the one of the later step is kept.

Ranks merge with one packed all_reduce. Values that are not sums (means, maxima) have a slot for each rank, zero in the
tensors of the others, so that the same sum transports them; each rank then merges the slots locally, in the same order.
Everything is sent as float64, which represents counts up to 2^53 exactly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from loka.errors import InputError
from loka.numerics.enums import Operand
from loka.probe.stats.moments import merge as merge_moments
from loka.probe.stats.moments import sketch_matrix, subset
from loka.probe.stats.site_stats import (
    FULL_WIDTH,
    JOINT,
    JointStats,
    Moments,
    OperandStats,
    SiteStats,
    WeightStats,
    comoment_columns,
    count_shapes,
)

Part = TypeVar("Part")
_NUMBERS = ("calls", "rows", "sampled", "nonfinite", "nonfinite_calls")


def merge_sites(a: SiteStats, b: SiteStats) -> SiteStats:
    """The merged statistics of one site, of the same K and N. A part that only one of them has is taken from it."""
    return SiteStats(
        name=a.name,
        k=a.k,
        n=a.n,
        input=_either(a.input, b.input, merge_operands),
        grad_output=_either(a.grad_output, b.grad_output, merge_operands),
        joint=_either(a.joint, b.joint, merge_joint),
        weight=_either(a.weight, b.weight, later_weight),
    )


def merge_operands(a: OperandStats, b: OperandStats) -> OperandStats:
    """The merged statistics of one operand of one site."""
    sums: dict[str, Any] = {name: getattr(a, name) + getattr(b, name) for name in (*_NUMBERS, *count_shapes(0))}
    amax = torch.maximum(a.column_amax, b.column_amax)
    return replace(a, **sums, moments=merge_moments(a.moments, b.moments), column_amax=amax)


def merge_joint(a: JointStats, b: JointStats) -> JointStats:
    """The merged joint moments. Raises InputError if they are of different features."""
    if not (torch.equal(a.input_features, b.input_features) and torch.equal(a.grad_features, b.grad_features)):
        raise InputError("joint moments are of different features; merge profiles written by one version")
    return JointStats(
        a.input_features,
        a.grad_features,
        merge_moments(a.moments, b.moments),
        a.coherent + b.coherent,
        a.incoherent + b.incoherent,
    )


def later_weight(a: WeightStats, b: WeightStats) -> WeightStats:
    """The weight of the later step; for equal steps (ranks have the same weight) the first."""
    return b if b.step > a.step else a


def _either(a: Part | None, b: Part | None, both: Callable[[Part, Part], Part]) -> Part | None:
    if a is None or b is None:
        return b if a is None else a
    return both(a, b)


@dataclass(frozen=True, slots=True)
class _Group:
    handle: dist.ProcessGroup
    rank: int
    size: int


def merge_across(stats: tuple[SiteStats, ...], group: dist.ProcessGroup) -> tuple[SiteStats, ...]:
    """The merged statistics of all ranks of `group`, equal on every rank; collective.

    Weights are the rank's own (replicated). A small all_reduce before the packed one checks that the ranks have the
    same sites.

    Raises InputError, on every rank, if they differ.
    """
    ranks = _Group(group, dist.get_rank(group), dist.get_world_size(group))
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(group) else None
    _check_same(stats, ranks, device)
    packed = torch.cat(
        [piece for site in stats for piece in _packed(site, ranks)] or [torch.zeros(1, dtype=torch.float64)]
    )
    packed = packed.to(device) if device is not None else packed
    dist.all_reduce(packed, group=group)
    reader = _Reader(packed.cpu())
    return tuple(_unpacked(site, reader, ranks) for site in stats)


def _check_same(stats: tuple[SiteStats, ...], ranks: _Group, device: torch.device | None) -> None:
    """Each rank puts a hash of its sites in its own slot."""
    text = repr([(site.name, site.k, site.n) for site in stats])
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")  # below 2^53
    slots = torch.zeros(ranks.size, dtype=torch.float64, device=device)
    slots[ranks.rank] = number
    dist.all_reduce(slots, group=ranks.handle)
    others = [rank for rank, other in enumerate(slots.tolist()) if other != number]
    if others:
        raise InputError(
            f"probe: rank {ranks.rank} has other sites than rank {others[0]} of its group: give all ranks of the group "
            f"the same model and policy"
        )


def _slots(values: Tensor, ranks: _Group) -> Tensor:
    slots = torch.zeros(ranks.size, values.numel(), dtype=torch.float64)
    slots[ranks.rank] = values.double().flatten()
    return slots.flatten()


def _packed(site: SiteStats, ranks: _Group) -> Iterator[Tensor]:
    for operand, width in ((site.input, site.k), (site.grad_output, site.n)):
        seen = operand or _nothing(width)
        yield torch.tensor([getattr(seen, name) for name in _NUMBERS], dtype=torch.float64)
        yield from (getattr(seen, name).double().flatten() for name in count_shapes(width))
        yield _slots(seen.column_amax, ranks)
        yield from _packed_moments(seen.moments, ranks)
    coherence = (0.0, 0.0) if site.joint is None else (site.joint.coherent, site.joint.incoherent)
    yield torch.tensor(coherence, dtype=torch.float64)
    joint = min(site.k, JOINT) + min(site.n, JOINT)
    yield from _packed_moments(site.joint.moments if site.joint is not None else _no_moments(joint), ranks)


def _packed_moments(moments: Moments, ranks: _Group) -> Iterator[Tensor]:
    yield _slots(torch.tensor([float(moments.count)], dtype=torch.float32), ranks)
    yield _slots(moments.mean, ranks)
    yield moments.diagonal.double()
    yield moments.comoment.double().flatten()


@dataclass(slots=True)
class _Reader:
    """Reads the pieces in the order in which they were packed."""

    packed: Tensor
    place: int = 0

    def take(self, *shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        self.place += size
        return self.packed[self.place - size : self.place].reshape(shape).clone()


def _unpacked(site: SiteStats, reader: _Reader, ranks: _Group) -> SiteStats:
    given = _unpacked_operand(Operand.INPUT, site.k, reader, ranks)
    grad = _unpacked_operand(Operand.GRAD_OUTPUT, site.n, reader, ranks)
    coherent, incoherent = reader.take(2).tolist()
    moments = _unpacked_moments(min(site.k, JOINT) + min(site.n, JOINT), reader, ranks)
    joint = JointStats(subset(site.k, JOINT), subset(site.n, JOINT), moments, coherent, incoherent)
    return replace(
        site,
        input=given if given.calls else None,
        grad_output=grad if grad.calls else None,
        joint=joint if moments.count else site.joint,
    )


def _unpacked_operand(operand: Operand, width: int, reader: _Reader, ranks: _Group) -> OperandStats:
    numbers: list[Any] = [round(number) for number in reader.take(len(_NUMBERS)).tolist()]
    counts: dict[str, Any] = {name: reader.take(*shape).round().long() for name, shape in count_shapes(width).items()}
    return OperandStats(
        operand=operand,
        **dict(zip(_NUMBERS, numbers, strict=True)),
        **counts,
        column_amax=reader.take(ranks.size, width).amax(0),
        moments=_unpacked_moments(width, reader, ranks),
    )


def _unpacked_moments(width: int, reader: _Reader, ranks: _Group) -> Moments:
    """The comoments about the common mean: the ranks' own comoments, plus those of the ranks' means."""
    counts, means = reader.take(ranks.size), reader.take(ranks.size, width)
    diagonal, comoment = reader.take(width), reader.take(width, comoment_columns(width))
    total = float(counts.sum())
    if not total:
        return Moments(0, torch.zeros_like(diagonal), diagonal, comoment)
    mean = counts @ means / total
    shifts = means - mean
    weighted = shifts * counts[:, None]
    across = shifts if width <= FULL_WIDTH else shifts @ sketch_matrix(width).double()
    return Moments(round(total), mean, diagonal + (weighted * shifts).sum(0), comoment + weighted.t() @ across)


def _no_moments(width: int) -> Moments:
    zeros = torch.zeros(width, dtype=torch.float64)
    return Moments(0, zeros, zeros, torch.zeros(width, comoment_columns(width), dtype=torch.float64))


def _nothing(width: int) -> OperandStats:
    """Statistics of an operand that a rank has not seen."""
    numbers: dict[str, Any] = dict.fromkeys(_NUMBERS, 0)
    counts: dict[str, Any] = {part: torch.zeros(shape).long() for part, shape in count_shapes(width).items()}
    amax = torch.zeros(width, dtype=torch.float64)
    return OperandStats(operand=Operand.INPUT, **numbers, **counts, moments=_no_moments(width), column_amax=amax)
