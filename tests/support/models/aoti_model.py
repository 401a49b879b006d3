"""A tower small enough to be compiled by AOTInductor in a test."""

from __future__ import annotations

import signal

import torch
from torch import Tensor, nn


class Tower(nn.Module):
    """Two linears with a norm on the flattened embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4 * 32, 128)
        self.norm = nn.LayerNorm(128)
        self.act = nn.SiLU()
        self.down = nn.Linear(128, 128)

    def forward(self, embeddings: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.norm(self.up(embeddings.flatten(1)))))
        return out


def build() -> nn.Module:
    return Tower()


def inputs(batch_size: int) -> tuple[Tensor]:
    made = torch.Generator().manual_seed(0)
    return (torch.randn(batch_size, 4, 32, generator=made).requires_grad_(),)


def crashing() -> nn.Module:
    """Ends the process that builds it by a signal."""
    signal.raise_signal(signal.SIGSEGV)
    return Tower()


def narrow() -> nn.Module:
    """Nothing of it runs in FP8."""
    return nn.Sequential(nn.Flatten(1), nn.Linear(4 * 32, 16))
