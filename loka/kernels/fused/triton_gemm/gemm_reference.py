"""Generated GEMMs in torch: the CPU implementation, and the reference of their kernels.

Computes in float32. Sums are torch's, whatever accumulation a kernel has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loka.errors import InputError
from loka.kernels.fused.norm import norm_reference
from loka.kernels.fused.norm.norm_reference import Forward
from loka.numerics.reference_matmul import reference_scaled_mm


def product(a: Tensor, b: Tensor, scale_a: Tensor | None = None, scale_b: Tensor | None = None) -> Tensor:
    """(a * scale_a) @ (b * scale_b).T in float32: a (M, K), b (N, K), scales (rows, 1) or (1, 1), both or neither."""
    if scale_a is not None and scale_b is not None:
        return reference_scaled_mm(a, scale_a, b, scale_b, torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        return torch.matmul(a.float(), b.float().t())


def epilogue(
    y: Tensor,
    *,
    add: Tensor | None = None,
    norm: str | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    block: int = 256,
    activation: str | None = None,
) -> Forward:
    """The epilogue of y (M, N): [+ add] -> [norm] -> [activation]; add, weight, bias are (N,).

    Statistics of a block_norm are (M, N / block). Raises InputError where blocks do not divide N.
    """
    if norm != "block_norm":
        return norm_reference.norm_forward(
            y, add=add, norm=norm, weight=weight, bias=bias, eps=eps, activation=activation
        )
    if y.shape[1] % block:
        raise InputError(f"blocks of {block} columns do not divide rows of {y.shape[1]}")
    y = y.float() if add is None else y.float() + add.float()
    kept = y
    rstd = torch.rsqrt(y.view(y.shape[0], y.shape[1] // block, block).square().mean(2) + eps)
    y = y * rstd.repeat_interleave(block, dim=1)
    y = y if weight is None else y * weight.float()
    activated = norm_reference.norm_forward(y, add=bias, activation=activation)
    return Forward(activated.y, activated.mean, rstd, kept)
