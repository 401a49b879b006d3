"""Merges the statistics of one site from shards, ranks and runs exactly, as from one pass over all their rows.

Counts are added, maxima are the larger one, moments follow Chan's formula in float64 (moments.merge). A weight is a
state at one step, not a sum over rows: the one of the later step is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from loka.errors import InputError
from loka.probe.stats.moments import merge as merge_moments
from loka.probe.stats.site_stats import JointStats, OperandStats, SiteStats, WeightStats

Part = TypeVar("Part")


def merge_sites(a: SiteStats, b: SiteStats) -> SiteStats:
    """The merged statistics of one site. A part that only one of them has is taken from it.

    Raises InputError for different sites or shapes.
    """
    if a.name != b.name:
        raise InputError(f"sites {a.name!r} and {b.name!r} cannot be merged: they are not the same site")
    if (a.k, a.n) != (b.k, b.n):
        raise InputError(
            f"site {a.name!r} was {a.n} x {a.k} (N x K) in one profile and {b.n} x {b.k} in another; merge profiles of"
            " one model, or probe again"
        )
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
    """The merged statistics of one operand of one site. Raises InputError for different operands."""
    if a.operand is not b.operand:
        raise InputError(f"statistics of {a.operand} and of {b.operand} cannot be merged: they are different operands")
    return OperandStats(
        operand=a.operand,
        calls=a.calls + b.calls,
        rows=a.rows + b.rows,
        sampled=a.sampled + b.sampled,
        nonfinite=a.nonfinite + b.nonfinite,
        nonfinite_calls=a.nonfinite_calls + b.nonfinite_calls,
        moments=merge_moments(a.moments, b.moments),
        values=a.values + b.values,
        relative=a.relative + b.relative,
        row_rms=a.row_rms + b.row_rms,
        row_spread=a.row_spread + b.row_spread,
        block_spread=a.block_spread + b.block_spread,
        column_amax=torch.maximum(a.column_amax, b.column_amax),
        call_amax=a.call_amax + b.call_amax,
    )


def merge_joint(a: JointStats, b: JointStats) -> JointStats:
    """The merged joint moments. Raises InputError if they are of different features."""
    for kind, left, right in (
        ("input", a.input_features, b.input_features),
        ("output gradient", a.grad_features, b.grad_features),
    ):
        if not torch.equal(left, right):
            raise InputError(
                f"joint moments are of different features of the {kind}; merge profiles written by one version"
            )
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
