"""What mixing kernels compute, in torch: their CPU implementation, and what they are checked against."""

from __future__ import annotations

import torch
from torch import Tensor


def mix_forward(x: Tensor, rank: Tensor, compress: Tensor) -> tuple[Tensor, Tensor]:
    """products (B, n, r) and compressed (B, c, d) of x (B, n, d), rank (n, r), compress (c, n), in the dtype of x."""
    return mix_products(x, rank), torch.matmul(compress, x)


def mix_products(x: Tensor, rank: Tensor) -> Tensor:
    """products (B, n, r) = x (B, n, d) @ (x^T @ rank (n, r)), in the dtype of x."""
    return torch.matmul(x, torch.matmul(x.transpose(1, 2), rank))


def mix_backward(
    dproducts: Tensor, dcompressed: Tensor, x: Tensor, rank: Tensor, compress: Tensor, passed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `mix_forward`: dx (B, n, d), with `passed` added and in its dtype; drank (1, n * r) and
    dcompress (1, c * n) in float32.
    """
    dx, drank = _products_backward(dproducts, x, rank)
    dcompressed = dcompressed.float()
    dx = dx + torch.matmul(compress.float().t(), dcompressed) + passed.float()
    dcompress = torch.einsum("bcd,bnd->cn", dcompressed, x.float()).reshape(1, -1)
    return dx.to(passed.dtype), drank, dcompress


def mix_products_backward(dproducts: Tensor, x: Tensor, rank: Tensor, passed: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `mix_products`, as `mix_backward` gives them."""
    dx, drank = _products_backward(dproducts, x, rank)
    return (dx + passed.float()).to(passed.dtype), drank


def _products_backward(dproducts: Tensor, x: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
    x, rank, dproducts = x.float(), rank.float(), dproducts.float()
    inner = torch.matmul(x.transpose(1, 2), rank)
    dinner = torch.matmul(x.transpose(1, 2), dproducts)
    dx = torch.matmul(dproducts, inner.transpose(1, 2)) + torch.matmul(rank, dinner.transpose(1, 2))
    return dx, torch.einsum("bnd,bdr->nr", x, dinner).reshape(1, -1)
