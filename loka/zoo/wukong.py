"""Wukong (arXiv 2403.02545): stacked factorisation machines over feature embeddings.

A layer takes n embeddings of dimension d, (B, n, d), and returns as many. The factorisation machine block makes the
first half of them from pairwise products of all; the linear compression block makes the second half as weighted sums.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.zoo.blocknorm import BlockNorm
from loka.zoo.features import FeatureEmbedding


@dataclass(frozen=True, slots=True)
class WukongSizes:
    """The sizes of a Wukong; `embeddings` is even."""

    embeddings: int  # n, feature embeddings that go through the layers
    dim: int  # d, of one embedding
    layers: int
    rank: int  # columns that the products of all pairs are projected on
    hidden: int  # width of every MLP's two hidden layers
    mods: bool = False  # no bias, BlockNorm and Hard Swish instead of biases, LayerNorm and SiLU


SMALL = WukongSizes(embeddings=64, dim=128, layers=4, rank=32, hidden=2048)
LARGE = WukongSizes(embeddings=128, dim=256, layers=4, rank=64, hidden=4096)
BLOCK = 256  # of BlockNorm


def norm(width: int, mods: bool) -> nn.Module:
    """LayerNorm, or with the mods BlockNorm of 256, of the whole width where that is less."""
    return BlockNorm(min(BLOCK, width)) if mods else nn.LayerNorm(width)


def activation(mods: bool) -> nn.Module:
    """SiLU, or Hard Swish with the mods."""
    return nn.Hardswish() if mods else nn.SiLU()


def mlp(inputs: int, hidden: int, outputs: int, mods: bool = False) -> nn.Sequential:
    """Two hidden layers, each Linear, norm, activation, and a last Linear: (B, inputs) -> (B, outputs)."""
    return nn.Sequential(
        nn.Linear(inputs, hidden, bias=not mods),
        norm(hidden, mods),
        activation(mods),
        nn.Linear(hidden, hidden, bias=not mods),
        norm(hidden, mods),
        activation(mods),
        nn.Linear(hidden, outputs, bias=not mods),
    )


class WukongLayer(nn.Module):
    """One interaction layer: (B, n, d) -> (B, n, d)."""

    def __init__(self, sizes: WukongSizes) -> None:
        super().__init__()
        n, made = sizes.embeddings, sizes.embeddings // 2  # each block makes half of the embeddings
        self.made, self.dim = made, sizes.dim
        self.rank = nn.Parameter(torch.randn(n, sizes.rank) * n**-0.5)
        self.compress = nn.Parameter(torch.randn(made, n) * n**-0.5)
        self.fmb_norm = norm(n * sizes.rank, sizes.mods)
        self.fmb = mlp(n * sizes.rank, sizes.hidden, made * sizes.dim, sizes.mods)
        self.norm = norm(sizes.dim, sizes.mods)

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
    parts["mlp"] = mlp(sizes.embeddings * sizes.dim, sizes.hidden, sizes.hidden, sizes.mods)
    parts["norm"] = norm(sizes.hidden, sizes.mods)
    parts["hardswish" if sizes.mods else "silu"] = activation(sizes.mods)
    parts["out"] = nn.Linear(sizes.hidden, 1)
    return nn.Sequential(parts)


class Wukong(nn.Module):
    """The dense part alone, for measuring speed: embeddings (B, n, d) -> logits (B, 1)."""

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

    `rows` gives each embedding table's length; with the dense features' one embedding that makes
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
