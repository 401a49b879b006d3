"""Small models for inputs at the ends of what numbers and sizes can be."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 32


def linear() -> nn.Sequential:
    """One linear."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 48))


def tower() -> nn.Sequential:
    """Linears with a norm in between, and one without."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)
    )


def pre_norm() -> nn.Sequential:
    """A norm before the first linear."""
    torch.manual_seed(0)
    return nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 16))


def narrow() -> nn.Sequential:
    """Linears and a norm of one feature."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1), nn.LayerNorm(1), nn.Linear(1, 16))


def inputs(batch: int) -> tuple[Tensor]:
    """Features (B, 32)."""
    return (torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(1)),)


def narrow_inputs(batch: int) -> tuple[Tensor]:
    """Features (B, 1)."""
    return (torch.randn(batch, 1, generator=torch.Generator().manual_seed(1)),)
