"""FM interactions in torch: the CPU implementation, and the reference of their kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def fm_forward(x: Tensor, rank: Tensor, compress: Tensor) -> tuple[Tensor, Tensor]:
    """products (B, n, r) and compressed (B, c, d) of x (B, n, d), rank (n, r), compress (c, n), in the dtype of x."""
    return fm_products_forward(x, rank), torch.matmul(compress, x)


def fm_products_forward(x: Tensor, rank: Tensor) -> Tensor:
    """products (B, n, r) = x (B, n, d) @ (x^T @ rank (n, r)), in the dtype of x."""
    return torch.matmul(x, torch.matmul(x.transpose(1, 2), rank))


def fm_backward(
    dproducts: Tensor, dcompressed: Tensor, x: Tensor, rank: Tensor, compress: Tensor, passed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `fm_forward`: dx (B, n, d), drank (1, n * r) and dcompress (1, c * n).

    `passed` is added to dx, which then has its dtype, otherwise that of x; the others are float32.
    """
    dx, drank = _products_backward(dproducts, x, rank)
    dcompressed = dcompressed.float()
    dx = dx + torch.matmul(compress.float().t(), dcompressed)
    dcompress = torch.einsum("bcd,bnd->cn", dcompressed, x.float()).reshape(1, -1)
    return _with_passed(dx, x, passed), drank, dcompress


def fm_products_backward(
    dproducts: Tensor, x: Tensor, rank: Tensor, passed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of `fm_products_forward`: dx and drank as in `fm_backward`."""
    dx, drank = _products_backward(dproducts, x, rank)
    return _with_passed(dx, x, passed), drank


def _with_passed(dx: Tensor, x: Tensor, passed: Tensor | None) -> Tensor:
    return dx.to(x.dtype) if passed is None else (dx + passed.float()).to(passed.dtype)


def _products_backward(dproducts: Tensor, x: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
    x, rank, dproducts = x.float(), rank.float(), dproducts.float()
    inner = torch.matmul(x.transpose(1, 2), rank)
    dinner = torch.matmul(x.transpose(1, 2), dproducts)
    dx = torch.matmul(dproducts, inner.transpose(1, 2)) + torch.matmul(rank, dinner.transpose(1, 2))
    return dx, torch.einsum("bnd,bdr->nr", x, dinner).reshape(1, -1)
