"""FinalMLP (arXiv 2304.00902): two MLPs over gated features, and a bilinear product of what they make."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.zoo.multi_task import hidden_layers


@dataclass(frozen=True, slots=True)
class FinalMLPSizes:
    """Sizes of a FinalMLP; the last width of both streams must be a multiple of `heads`."""

    embeddings: int
    dim: int
    gate: int  # hidden width of the gates
    first: tuple[int, ...]  # widths of one stream
    second: tuple[int, ...]
    heads: int  # of the bilinear fusion

    @property
    def width(self) -> int:
        """Width of all embeddings."""
        return self.embeddings * self.dim


FINAL_MLP_SIZES = FinalMLPSizes(embeddings=40, dim=64, gate=512, first=(2048, 1024, 512), second=(1024, 512), heads=4)


class FeatureGate(nn.Module):
    """2 * sigmoid(mlp(context)) * features: context (dim,), features (B, width) -> (B, width).

    The context of this stream is a Parameter, as in the paper where no features are chosen for it.
    """

    def __init__(self, sizes: FinalMLPSizes) -> None:
        super().__init__()
        self.context = nn.Parameter(torch.randn(1, sizes.dim) * 0.1)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.dim, sizes.gate), nn.ReLU(), nn.Linear(sizes.gate, sizes.width), nn.Sigmoid()
        )

    def forward(self, features: Tensor) -> Tensor:
        gated: Tensor = 2 * self.mlp(self.context) * features
        return gated


class BilinearFusion(nn.Module):
    """linear(x) + linear(y) + sum over heads of x_h^T @ W_h @ y_h: (B, x) and (B, y) -> (B, 1)."""

    def __init__(self, x: int, y: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.x, self.y = nn.Linear(x, 1), nn.Linear(y, 1, bias=False)
        self.bilinear = nn.ModuleList([nn.Linear(x // heads, y // heads, bias=False) for _ in range(heads)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.x(x) + self.y(y)
        for linear, x_head, y_head in zip(self.bilinear, x.chunk(self.heads, 1), y.chunk(self.heads, 1), strict=True):
            out = out + (linear(x_head) * y_head).sum(1, keepdim=True)
        return out


class FinalMLP(nn.Module):
    """Only the dense part: embeddings (B, embeddings, dim) -> logits (B, 1)."""

    def __init__(self, sizes: FinalMLPSizes) -> None:
        super().__init__()
        self.first_gate, self.second_gate = FeatureGate(sizes), FeatureGate(sizes)
        self.first = hidden_layers(sizes.width, sizes.first)
        self.second = hidden_layers(sizes.width, sizes.second)
        self.fuse = BilinearFusion(sizes.first[-1], sizes.second[-1], sizes.heads)

    def forward(self, embeddings: Tensor) -> Tensor:
        features = embeddings.flatten(1)
        first, second = self.first(self.first_gate(features)), self.second(self.second_gate(features))
        logits: Tensor = self.fuse(first, second)
        return logits
