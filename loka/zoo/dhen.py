"""DHEN-like composite (arXiv 2203.11014): each layer sums several kinds of interactions of the same embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.zoo.dlrm import CrossLayer, over_arch


@dataclass(frozen=True, slots=True)
class DHENSizes:
    """Sizes of a DHEN, whose width is `embeddings * dim`."""

    embeddings: int  # n
    dim: int  # d
    layers: int
    rank: int  # of the cross layer
    hidden: int  # of the MLP
    over: tuple[int, ...]  # widths of the over-arch's hidden layers

    @property
    def width(self) -> int:
        """Width of all embeddings."""
        return self.embeddings * self.dim


DHEN_SIZES = DHENSizes(embeddings=32, dim=64, layers=3, rank=512, hidden=2048, over=(1024, 512))


class InnerProducts(nn.Module):
    """A linear of all inner products of two embeddings, as of a factorisation machine: (B, n, d) -> (B, n * d)."""

    def __init__(self, sizes: DHENSizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.embeddings**2)
        self.linear = nn.Linear(sizes.embeddings**2, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        products = torch.matmul(x, x.transpose(1, 2)).flatten(1)
        out: Tensor = self.linear(self.norm(products))
        return out


class DHENLayer(nn.Module):
    """norm(cross layer + MLP + inner products + x): (B, n, d) -> the same."""

    def __init__(self, sizes: DHENSizes) -> None:
        super().__init__()
        self.cross = CrossLayer(sizes.width, sizes.rank)
        self.mlp = nn.Sequential(nn.Linear(sizes.width, sizes.hidden), nn.ReLU(), nn.Linear(sizes.hidden, sizes.width))
        self.products = InnerProducts(sizes)
        self.norm = nn.LayerNorm(sizes.dim)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        ensemble = self.cross(flat, flat) + self.mlp(flat) + self.products(x)
        out: Tensor = self.norm(ensemble.view_as(x) + x)
        return out


class DHEN(nn.Module):
    """Only the dense part: embeddings (B, n, d) -> logits (B, 1)."""

    def __init__(self, sizes: DHENSizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DHENLayer(sizes) for _ in range(sizes.layers)])
        self.over = over_arch(sizes.width, sizes.over)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.over(x.flatten(1))
        return logits
