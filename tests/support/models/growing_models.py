"""A model of experts that grows after it was planned."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, HIDDEN = 16, 32


class Expert(nn.Module):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Head(nn.Module):
    """A product of a Parameter, of another one where there is one, and of what a child returns."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.Parameter(torch.randn(2, WIDTH, WIDTH))
        self.more: nn.Parameter | None = None
        self.last: nn.Module = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.kernels[0] + x @ self.kernels[1][:, :WIDTH]
        return self.last(x if self.more is None else x @ self.more)


class Attention(nn.Module):
    """Products without a Parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.t()).softmax(-1) @ x


class Experts(nn.Module):
    """Embedded ids and some experts."""

    def __init__(self, experts: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.between: nn.Module = nn.Identity()
        self.head = Head()
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.run_spare = False

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x + self.table(ids)
        x = self.spare(x) if self.run_spare else x
        return self.head(self.between(sum(expert(x) for expert in self.experts)))


def inputs(batch_size: int) -> tuple[Tensor, Tensor]:
    """Arguments of its forward."""
    return torch.randn(batch_size, WIDTH), torch.zeros(batch_size, dtype=torch.long)
