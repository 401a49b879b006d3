"""Models of which a part needs no gradient: LoRA on a frozen base, a frozen tower, a branch that no output reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 32


class LoRA(nn.Module):
    """A linear, frozen, and two narrow ones beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def tower() -> nn.Sequential:
    """Two blocks of a linear, a norm and an activation, and a head."""
    blocks = [(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.SiLU()) for _ in range(2)]
    return nn.Sequential(*(part for block in blocks for part in block), nn.Linear(WIDTH, WIDTH))


def adapted() -> nn.Sequential:
    """The tower with LoRA on its linears."""
    model = tower()
    for place in (0, 3, 6):
        model[place] = LoRA(model[place])
    return model


def frozen_tower() -> nn.Sequential:
    """The tower, of which the head alone is trained."""
    model = tower()
    model[:6].requires_grad_(False)
    return model


class Gated(nn.Module):
    """A gate for a next level, which there is not."""

    def __init__(self) -> None:
        super().__init__()
        self.expert, self.gate, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.expert(x))
        return self.head(y), torch.sigmoid(self.gate(x)) * x


class Level(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), Gated()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))[0]


def level() -> Level:
    return Level()


def inputs(batch_size: int) -> tuple[Tensor]:
    """Arguments of all of them."""
    return (torch.randn(batch_size, WIDTH),)
