"""Statistics of one site as the trackers learn them from whole matrices, and of a weight that has no structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from loka.numerics.enums import Operand
from loka.probe.stats.moments import JointTracker, joint_stats
from loka.probe.stats.operand_tracker import OperandTracker, operand_stats
from loka.probe.stats.site_stats import (
    VALUE_BINS,
    WEIGHT_ROWS,
    JointStats,
    LowRank,
    OperandStats,
    SiteStats,
    WeightStats,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def operand_of(operand: Operand, *calls: Tensor) -> OperandStats:
    """Statistics of all rows of these calls."""
    tracker = OperandTracker(operand, calls[0].shape[1], "cpu")
    for call in calls:
        tracker.update(call, call.abs().amax(0) if len(call) else torch.zeros(call.shape[1]), len(call))
    return operand_stats(tracker.snapshot())


def joint_of(inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> JointStats:
    """Joint statistics of these calls."""
    tracker = JointTracker(inputs[0].shape[1], grads[0].shape[1], "cpu")
    for x, grad in zip(inputs, grads, strict=True):
        tracker.update(x[:, tracker.input_features], grad[:, tracker.grad_features])
    return joint_stats(tracker.snapshot())


def weight_of(weight: Tensor, **changes: Any) -> WeightStats:
    """A weight as independent elements of mean 0 and variance 1, whatever it holds."""
    n, k = weight.shape
    zeros = {size: torch.zeros(size, dtype=torch.float64) for size in (n, k)}
    u, v = (LowRank(zeros[size][:, None], zeros[size] + 1.0, 0.0) for size in (n, k))
    made = WeightStats(
        step=1,
        updates=1,
        amax=float(weight.abs().max()),
        nonfinite=int((~weight.isfinite()).sum()),
        row_mean=zeros[n],
        column_mean=zeros[k],
        u=u,
        v=v,
        row_index=torch.arange(n)[:WEIGHT_ROWS],
        rows=weight[:WEIGHT_ROWS],
        column_index=torch.arange(k)[:WEIGHT_ROWS],
        columns=weight[:, :WEIGHT_ROWS],
        row_amax=weight.abs().amax(1),
        column_amax=weight.abs().amax(0),
        values=torch.zeros(VALUE_BINS, dtype=torch.int64),
    )
    return replace(made, **changes)


def site_of(
    inputs: Sequence[Tensor], grads: Sequence[Tensor], weight: WeightStats | None = None, name: str = "site"
) -> SiteStats:
    """Statistics of a site's calls."""
    operands = operand_of(Operand.INPUT, *inputs), operand_of(Operand.GRAD_OUTPUT, *grads)
    return SiteStats(name, inputs[0].shape[1], grads[0].shape[1], *operands, joint_of(inputs, grads), weight)
