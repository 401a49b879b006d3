"""The models that the dispatch tests bind."""

from __future__ import annotations

import torch
from torch import nn


def mlp() -> nn.Sequential:
    """Two hidden layers of 32 and a head of 1; the first input needs no gradient by itself."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))


class Block(nn.Module):
    """A residual block with one GEMM in a child and one on a Parameter."""

    def __init__(self):
        super().__init__()
        self.up = nn.Sequential(nn.Linear(32, 64), nn.SiLU())
        self.down = nn.Parameter(torch.randn(64, 32) / 8)

    def forward(self, x):
        return self.up(x) @ self.down + x


class Blocks(nn.Module):
    """Two blocks and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Shared(nn.Module):
    """One linear, called three times under two names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(32, 32)
        self.two = self.one

    def forward(self, x):
        return self.one(self.two(self.one(x)))


def step(model, rows=8, seed=0):
    """One forward and backward on random rows; returns the input's gradient."""
    torch.manual_seed(seed)
    x = torch.randn(rows, 32, requires_grad=True)
    model(x).square().sum().backward()
    return x.grad
