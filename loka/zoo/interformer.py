"""InterFormer (arXiv 2411.09852): feature interactions and a behaviour sequence that inform each other in every layer.

Three archs are interleaved. The interaction arch learns from the features and a summary of the sequence; the sequence
arch transforms the sequence by a summary of the features, and attends; the cross arch makes both summaries, gated.
Simplified: the features interact by inner products alone, and the sequence's summary is its first tokens (the summary
of the features, put before it as CLS tokens) and its most recent ones, without pooling by attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.zoo.dlrm import over_arch


@dataclass(frozen=True, slots=True)
class InterFormerSizes:
    """Sizes of an InterFormer; `dim` must be a multiple of `heads`."""

    features: int  # n, embeddings of features
    length: int  # S, of the sequence
    dim: int  # d, of an embedding
    heads: int
    summary: int  # embeddings that summarise the features; CLS tokens of the sequence
    recent: int  # last behaviours, which summarise the sequence with its CLS tokens
    hidden: int  # of the interaction arch
    layers: int
    over: tuple[int, ...]  # widths of the over-arch's hidden layers


INTERFORMER_SIZES = InterFormerSizes(
    features=64, length=64, dim=128, heads=4, summary=4, recent=4, hidden=2048, layers=3, over=(1024, 512)
)


class Gated(nn.Module):
    """x * sigmoid(linear(x)): (B, t, d) -> the same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate(x))


class InteractionArch(nn.Module):
    """Features (B, n, d) and the sequence's summary (B, t, d) -> features (B, n, d): inner products, MLP, residual."""

    def __init__(self, sizes: InterFormerSizes) -> None:
        super().__init__()
        n = sizes.features
        self.mlp = nn.Sequential(
            nn.Linear(n * (n + sizes.summary + sizes.recent), sizes.hidden),
            nn.LayerNorm(sizes.hidden),
            nn.ReLU(),
            nn.Linear(sizes.hidden, n * sizes.dim),
        )
        self.norm = nn.LayerNorm(sizes.dim)

    def forward(self, features: Tensor, of_sequence: Tensor) -> Tensor:
        products = torch.matmul(features, torch.cat([features, of_sequence], 1).transpose(1, 2))
        out: Tensor = self.norm(self.mlp(products.flatten(1)).view_as(features) + features)
        return out


class SequenceArch(nn.Module):
    """Sequence (B, s, d), by the features' summary (B, t, d) -> (B, s, d): a personal matrix, then attention."""

    def __init__(self, sizes: InterFormerSizes) -> None:
        super().__init__()
        self.heads, self.dim = sizes.heads, sizes.dim
        self.personal = nn.Linear(sizes.summary * sizes.dim, sizes.dim * sizes.dim)
        self.norm = nn.LayerNorm(sizes.dim)
        self.qkv = nn.Linear(sizes.dim, 3 * sizes.dim)
        self.out = nn.Linear(sizes.dim, sizes.dim)
        self.out_norm = nn.LayerNorm(sizes.dim)

    def forward(self, sequence: Tensor, of_features: Tensor) -> Tensor:
        matrix = self.personal(of_features.flatten(1)).view(-1, self.dim, self.dim) * self.dim**-0.5
        x = self.norm(torch.matmul(sequence, matrix) + sequence)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        attention = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = self.out_norm(self.out(attention) + x)
        return out


class InterFormerLayer(nn.Module):
    """Features (B, n, d) and sequence (B, t + S, d), its first t tokens CLS -> both, of the same shapes."""

    def __init__(self, sizes: InterFormerSizes) -> None:
        super().__init__()
        self.cls, self.recent = sizes.summary, sizes.recent
        self.compress = nn.Parameter(torch.randn(sizes.summary, sizes.features) * sizes.features**-0.5)
        self.gate_features, self.gate_sequence = Gated(sizes.dim), Gated(sizes.dim)
        self.interact, self.attend = InteractionArch(sizes), SequenceArch(sizes)

    def forward(self, features: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
        of_features = self.gate_features(torch.matmul(self.compress, features))
        of_sequence = self.gate_sequence(torch.cat([sequence[:, : self.cls], sequence[:, -self.recent :]], 1))
        return self.interact(features, of_sequence), self.attend(sequence, of_features)


class InterFormer(nn.Module):
    """Only the dense part: embeddings of features (B, n, d) and behaviours (B, S, d) -> logits (B, 1)."""

    def __init__(self, sizes: InterFormerSizes) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.randn(sizes.summary, sizes.features) * sizes.features**-0.5)
        self.layers = nn.ModuleList([InterFormerLayer(sizes) for _ in range(sizes.layers)])
        self.tokens, self.recent = sizes.summary, sizes.recent
        self.over = over_arch((sizes.features + sizes.summary + sizes.recent) * sizes.dim, sizes.over)

    def forward(self, features: Tensor, sequence: Tensor) -> Tensor:
        sequence = torch.cat([torch.matmul(self.cls, features), sequence], 1)
        for layer in self.layers:
            features, sequence = layer(features, sequence)
        summary = torch.cat([features, sequence[:, : self.tokens], sequence[:, -self.recent :]], 1)
        logits: Tensor = self.over(summary.flatten(1))
        return logits
