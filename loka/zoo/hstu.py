"""HSTU (arXiv 2402.17152): a sequence ranker whose attention has no softmax, and whose output is gated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class HSTUSizes:
    """Sizes of an HSTU; `dim` must be a multiple of `heads`."""

    length: int  # of the sequence
    dim: int
    heads: int
    layers: int


HSTU_SIZES = HSTUSizes(length=256, dim=1024, heads=8, layers=2)


class HSTULayer(nn.Module):
    """norm -> linear -> SiLU, split into u, v, q and k; norm(attention) * u -> linear; residual: (B, S, D) -> same.

    The attention is causal and pointwise: SiLU(q @ k^T + bias of the relative position) / S, times v.
    """

    mask: Tensor
    distance: Tensor

    def __init__(self, sizes: HSTUSizes) -> None:
        super().__init__()
        self.of_heads = (sizes.length, sizes.heads, sizes.dim // sizes.heads)
        self.norm = nn.LayerNorm(sizes.dim)
        self.uvqk = nn.Linear(sizes.dim, 4 * sizes.dim)
        self.position = nn.Parameter(torch.randn(sizes.length) * 0.02)  # by how far back a token is
        self.attention_norm = nn.LayerNorm(sizes.dim)
        self.out = nn.Linear(sizes.dim, sizes.dim)
        place = torch.arange(sizes.length)
        back = place[:, None] - place[None, :]
        self.register_buffer("distance", back.clamp(min=0), persistent=False)
        self.register_buffer("mask", (back >= 0) / sizes.length, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        u, v, q, k = nn.functional.silu(self.uvqk(self.norm(x))).chunk(4, 2)
        v, q, k = (part.view(-1, *self.of_heads).transpose(1, 2) for part in (v, q, k))
        scores = torch.matmul(q, k.transpose(2, 3)) + self.position[self.distance]
        attention = torch.matmul(nn.functional.silu(scores) * self.mask, v)
        out: Tensor = self.out(self.attention_norm(attention.transpose(1, 2).flatten(2)) * u) + x
        return out


class HSTURanker(nn.Module):
    """Embedded behaviours, the candidate last, (B, length, dim) -> logits (B, 1) of the candidate."""

    def __init__(self, sizes: HSTUSizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList([HSTULayer(sizes) for _ in range(sizes.layers)])
        self.norm = nn.LayerNorm(sizes.dim)
        self.out = nn.Linear(sizes.dim, 1)

    def forward(self, sequence: Tensor) -> Tensor:
        for layer in self.layers:
            sequence = layer(sequence)
        logits: Tensor = self.out(self.norm(sequence[:, -1]))
        return logits
