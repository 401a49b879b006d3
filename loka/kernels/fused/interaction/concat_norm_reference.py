"""Norms over concatenated rows in torch: the CPU implementation, and the reference of their kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loka.kernels.fused.norm.norm_reference import Backward, Forward, norm_backward, norm_forward


def concat(parts: Sequence[Tensor], residual: Tensor | None) -> Tensor:
    """Rows (B * n, width) in float32: the parts (B, n_i, width) one after another, plus the residual (B, n, width)."""
    rows = torch.cat([part.float() for part in parts], 1)
    if residual is not None:
        rows = rows + residual.float()
    return rows.reshape(-1, rows.shape[-1])


def concat_norm_forward(
    parts: Sequence[Tensor],
    *,
    norm: str,
    eps: float,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Forward:
    """The norm of the concatenated rows, (B * n, width) in float32, and its statistics."""
    return norm_forward(concat(parts, residual), norm=norm, weight=weight, bias=bias, eps=eps)


def concat_norm_backward(
    grad: Tensor,
    parts: Sequence[Tensor],
    *,
    norm: str,
    rstd: Tensor,
    mean: Tensor | None = None,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
) -> Backward:
    """Gradients in float32: of the concatenated rows (B * n, width), and of weight and bias (1, width)."""
    rows = concat(parts, residual)
    return norm_backward(grad.reshape(rows.shape), x=rows, norm=norm, weight=weight, mean=mean, rstd=rstd)
