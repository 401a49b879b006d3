"""RankMixer (arXiv 2507.15551): tokens of features, mixed without parameters, and an MLP of its own for each token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.zoo.dlrm import over_arch


@dataclass(frozen=True, slots=True)
class RankMixerSizes:
    """Sizes of a RankMixer; `dim` must be a multiple of `tokens`."""

    tokens: int
    features: int  # width of the features that make one token
    dim: int  # of a token
    hidden: int  # width of each token's MLP
    layers: int
    over: tuple[int, ...]  # widths of the over-arch's hidden layers


RANKMIXER_SIZES = RankMixerSizes(tokens=16, features=320, dim=768, hidden=2304, layers=2, over=(256,))


class PerToken(nn.ModuleList):
    """A module of its own for each token: (B, tokens, inputs) -> (B, tokens, outputs)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([module(x[:, i]) for i, module in enumerate(self)], 1)


def token_mlp(sizes: RankMixerSizes) -> nn.Sequential:
    """The MLP of one token: (B, dim) -> (B, dim)."""
    return nn.Sequential(nn.Linear(sizes.dim, sizes.hidden), nn.GELU(), nn.Linear(sizes.hidden, sizes.dim))


class RankMixerLayer(nn.Module):
    """Token mixing, then an MLP for each token, each with a residual and a norm: (B, tokens, dim) -> the same."""

    def __init__(self, sizes: RankMixerSizes) -> None:
        super().__init__()
        self.of_heads = (sizes.tokens, sizes.tokens, sizes.dim // sizes.tokens)
        self.mix_norm = nn.LayerNorm(sizes.dim)
        self.mlps = PerToken([token_mlp(sizes) for _ in range(sizes.tokens)])
        self.norm = nn.LayerNorm(sizes.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Each token is split into as many heads as there are tokens; the new token i has head i of all of them."""
        heads = x.reshape(-1, *self.of_heads)
        x = self.mix_norm(heads.transpose(1, 2).flatten(2) + x)
        out: Tensor = self.norm(self.mlps(x) + x)
        return out


class RankMixer(nn.Module):
    """Only the dense part: features of each token (B, tokens, features) -> logits (B, 1)."""

    def __init__(self, sizes: RankMixerSizes) -> None:
        super().__init__()
        self.tokenize = PerToken([nn.Linear(sizes.features, sizes.dim) for _ in range(sizes.tokens)])
        self.layers = nn.ModuleList([RankMixerLayer(sizes) for _ in range(sizes.layers)])
        self.over = over_arch(sizes.dim, sizes.over)

    def forward(self, features: Tensor) -> Tensor:
        x = self.tokenize(features)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.over(x.mean(1))
        return logits
