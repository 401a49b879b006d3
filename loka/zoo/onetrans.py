"""OneTrans (arXiv 2510.26104): one causal transformer over behaviours and features, without its pyramid of queries.

Behaviour tokens share weights. Each of the tokens of features, which come after them, has weights of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.zoo.dlrm import over_arch


@dataclass(frozen=True, slots=True)
class OneTransSizes:
    """Sizes of a OneTrans; `dim` must be a multiple of `heads`."""

    behaviours: int  # S, tokens of the sequence
    features: int  # F, tokens after it
    dim: int
    heads: int
    hidden: int  # of the feed-forward networks
    layers: int
    over: tuple[int, ...]  # widths of the over-arch's hidden layers


ONETRANS_SIZES = OneTransSizes(behaviours=240, features=16, dim=384, heads=6, hidden=1536, layers=2, over=(512,))


class Mixed(nn.Module):
    """One module for all behaviours, and one for each feature: (B, S + F, inputs) -> (B, S + F, outputs)."""

    def __init__(self, features: int, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.shared = make()
        self.own = nn.ModuleList([make() for _ in range(features)])

    def forward(self, x: Tensor) -> Tensor:
        behaviours = x.shape[1] - len(self.own)
        own = [module(x[:, behaviours + i]) for i, module in enumerate(self.own)]
        return torch.cat([self.shared(x[:, :behaviours]), torch.stack(own, 1)], 1)


def feed_forward(sizes: OneTransSizes) -> nn.Sequential:
    """The feed-forward network of a token: (..., dim) -> the same."""
    return nn.Sequential(nn.Linear(sizes.dim, sizes.hidden), nn.GELU(), nn.Linear(sizes.hidden, sizes.dim))


class OneTransBlock(nn.Module):
    """Causal attention and feed-forward networks, behind an RMSNorm each: (B, S + F, D) -> the same."""

    def __init__(self, sizes: OneTransSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.attention_norm, self.norm = nn.RMSNorm(sizes.dim), nn.RMSNorm(sizes.dim)
        self.qkv = Mixed(sizes.features, lambda: nn.Linear(sizes.dim, 3 * sizes.dim))
        self.out = nn.Linear(sizes.dim, sizes.dim)
        self.mlp = Mixed(sizes.features, lambda: feed_forward(sizes))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, 2))
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.out(attention.transpose(1, 2).flatten(2)) + x
        out: Tensor = self.mlp(self.norm(x)) + x
        return out


class OneTrans(nn.Module):
    """Only the dense part: tokens of behaviours, then of features, (B, S + F, D) -> logits (B, 1)."""

    def __init__(self, sizes: OneTransSizes) -> None:
        super().__init__()
        self.features = sizes.features
        self.blocks = nn.ModuleList([OneTransBlock(sizes) for _ in range(sizes.layers)])
        self.norm = nn.RMSNorm(sizes.dim)
        self.over = over_arch(sizes.features * sizes.dim, sizes.over)

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        logits: Tensor = self.over(self.norm(tokens[:, -self.features :]).flatten(1))
        return logits
