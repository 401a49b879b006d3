"""Wukong (arXiv 2403.02545): stacked factorisation machines over feature embeddings.

A layer maps n embeddings of dimension d, (B, n, d), to as many. The factorisation machine block makes the first half
from pairwise products of all inputs; the linear compression block makes the second half as weighted sums.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.zoo.clicks import FeatureEmbedding


@dataclass(frozen=True, slots=True)
class WukongSizes:
    """Sizes of a Wukong; `embeddings` must be even."""

    embeddings: int  # n, the number of feature embeddings in each layer
    dim: int  # d, of an embedding
    layers: int
    rank: int  # columns that the pairwise products are projected to
    hidden: int  # width of the two hidden layers of every MLP


SMALL = WukongSizes(embeddings=64, dim=128, layers=4, rank=32, hidden=2048)
LARGE = WukongSizes(embeddings=128, dim=256, layers=4, rank=64, hidden=4096)


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Two hidden layers, each Linear, LayerNorm, SiLU, and a last Linear: (B, inputs) -> (B, outputs)."""
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.LayerNorm(hidden),
        nn.SiLU(),
        nn.Linear(hidden, hidden),
        nn.LayerNorm(hidden),
        nn.SiLU(),
        nn.Linear(hidden, outputs),
    )


class WukongLayer(nn.Module):
    """One interaction layer: (B, n, d) -> (B, n, d)."""

    def __init__(self, sizes: WukongSizes) -> None:
        super().__init__()
        n, made = sizes.embeddings, sizes.embeddings // 2  # each block makes half of the embeddings
        self.made, self.dim = made, sizes.dim
        self.rank = nn.Parameter(torch.randn(n, sizes.rank) * n**-0.5)
        self.compress = nn.Parameter(torch.randn(made, n) * n**-0.5)
        self.fmb_norm = nn.LayerNorm(n * sizes.rank)
        self.fmb = mlp(n * sizes.rank, sizes.hidden, made * sizes.dim)
        self.norm = nn.LayerNorm(sizes.dim)

    def forward(self, x: Tensor) -> Tensor:
        """All pairwise products x @ x^T are taken at low rank: x @ (x^T @ rank) is (B, n, rank)."""
        products = torch.matmul(x, torch.matmul(x.transpose(1, 2), self.rank))
        interactions = self.fmb(self.fmb_norm(products.flatten(1))).view(-1, self.made, self.dim)
        compressed = torch.matmul(self.compress, x)
        out: Tensor = self.norm(torch.cat([interactions, compressed], 1) + x)
        return out


def wukong_layers(sizes: WukongSizes) -> nn.ModuleList:
    """The stack of interaction layers."""
    return nn.ModuleList([WukongLayer(sizes) for _ in range(sizes.layers)])


def wukong_head(sizes: WukongSizes) -> nn.Sequential:
    """From all embeddings to one logit: (B, n * d) -> (B, 1)."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["mlp"] = mlp(sizes.embeddings * sizes.dim, sizes.hidden, sizes.hidden)
    parts["norm"] = nn.LayerNorm(sizes.hidden)
    parts["silu"] = nn.SiLU()
    parts["out"] = nn.Linear(sizes.hidden, 1)
    return nn.Sequential(parts)


class Wukong(nn.Module):
    """Only the dense part, for measuring speed: embeddings (B, n, d) -> logits (B, 1)."""

    def __init__(self, sizes: WukongSizes) -> None:
        super().__init__()
        self.layers = wukong_layers(sizes)
        self.head = wukong_head(sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.flatten(1))
        return logits


class WukongRanker(nn.Module):
    """The whole ranker: dense features (B, dense) and categorical ids (B, tables) -> logits (B,).

    `rows` has the length of each embedding table; with the embedding of the dense features,
    `len(rows) + 1 == sizes.embeddings`.
    """

    def __init__(self, sizes: WukongSizes, rows: tuple[int, ...], dense: int) -> None:
        super().__init__()
        if len(rows) + 1 != sizes.embeddings:
            raise ValueError(
                f"{len(rows)} tables and the dense features make {len(rows) + 1} embeddings, "
                f"but sizes.embeddings is {sizes.embeddings}"
            )
        self.embed = FeatureEmbedding(rows, dense, sizes.dim)
        self.layers = wukong_layers(sizes)
        self.head = wukong_head(sizes)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.embed(dense, ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.flatten(1))
        return logits.squeeze(1)
