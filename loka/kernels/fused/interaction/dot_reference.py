"""Dot interactions in torch: the CPU implementation, and the reference of their kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def dot_forward(x: Tensor) -> Tensor:
    """The products of all pairs of rows (B, n, n) of x (B, n, d), in its dtype."""
    return torch.matmul(x, x.transpose(1, 2))


def dot_backward(dproducts: Tensor, x: Tensor) -> Tensor:
    """The gradient of x (B, n, d), in its dtype, from that of the products (B, n, n)."""
    grad = dproducts.float()
    return torch.matmul(grad + grad.transpose(1, 2), x.float()).to(x.dtype)
