"""AutoInt (arXiv 1810.11921): self-attention over feature embeddings, beside an MLP (its AutoInt+)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.zoo.dlrm import over_arch


@dataclass(frozen=True, slots=True)
class AutoIntSizes:
    """Sizes of an AutoInt+."""

    embeddings: int
    dim: int
    attention: int  # width of an attention layer's output, a multiple of `heads`
    heads: int
    layers: int
    over: tuple[int, ...]  # widths of the MLP's hidden layers


AUTOINT_SIZES = AutoIntSizes(embeddings=40, dim=64, attention=128, heads=2, layers=3, over=(1024, 512, 256))


class InteractingLayer(nn.Module):
    """relu(attention + linear(x)), multi-head, over all pairs of embeddings: (B, n, inputs) -> (B, n, attention)."""

    def __init__(self, inputs: int, sizes: AutoIntSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.query = nn.Linear(inputs, sizes.attention, bias=False)
        self.key = nn.Linear(inputs, sizes.attention, bias=False)
        self.value = nn.Linear(inputs, sizes.attention, bias=False)
        self.residual = nn.Linear(inputs, sizes.attention, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        of_heads = (linear(x).unflatten(2, (self.heads, -1)) for linear in (self.query, self.key, self.value))
        q, k, v = (part.transpose(1, 2) for part in of_heads)
        weights = torch.softmax(torch.matmul(q, k.transpose(2, 3)), 3)
        return torch.relu(torch.matmul(weights, v).transpose(1, 2).flatten(2) + self.residual(x))


class AutoInt(nn.Module):
    """Only the dense part: embeddings (B, embeddings, dim) -> logits (B, 1)."""

    def __init__(self, sizes: AutoIntSizes) -> None:
        super().__init__()
        widths = [sizes.dim] + [sizes.attention] * (sizes.layers - 1)
        self.layers = nn.ModuleList([InteractingLayer(width, sizes) for width in widths])
        self.out = nn.Linear(sizes.embeddings * sizes.attention, 1)
        self.over = over_arch(sizes.embeddings * sizes.dim, sizes.over)

    def forward(self, embeddings: Tensor) -> Tensor:
        x = embeddings
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.out(x.flatten(1)) + self.over(embeddings.flatten(1))
        return logits
