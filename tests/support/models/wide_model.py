"""A model whose sites are wide enough that torch sums in several threads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 512


def build() -> nn.Module:
    """Two linears and a logit."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


def inputs(batch_size: int) -> tuple[Tensor]:
    """Features (B, WIDTH)."""
    return (torch.randn(batch_size, WIDTH),)
