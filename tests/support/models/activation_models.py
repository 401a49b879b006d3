"""MLPs with one activation, in another spelling after each linear."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _by_where(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.2 * x)


def _by_maximum(x: Tensor) -> Tensor:
    return torch.maximum(x, 0.01 * x)


def _in_place(x: Tensor) -> Tensor:
    return F.leaky_relu(x, 0.2, inplace=True)


TANHS = (nn.Tanh(), torch.tanh, F.tanh, Tensor.tanh, torch.tanh_)
LEAKY_RELUS = (nn.LeakyReLU(0.2, inplace=True), F.leaky_relu, _in_place, _by_where, _by_maximum)


class Activated(nn.Module):
    """Linear -> LayerNorm -> activation -> Linear -> activation -> Linear -> ..., each spelled as told."""

    def __init__(self, spellings: Sequence[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.act, *self.others = spellings  # the first is a module
        self.first, self.norm, self.last = nn.Linear(48, 64), nn.LayerNorm(64), nn.Linear(64, 16)
        self.between = nn.ModuleList([nn.Linear(64, 64) for _ in self.others])

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.first(x)))
        for linear, activation in zip(self.between, self.others, strict=True):
            x = activation(linear(x))
        out: Tensor = self.last(x)
        return out


def tanhs() -> Activated:
    """Spellings of tanh."""
    return Activated(TANHS)


def leaky_relus() -> Activated:
    """Spellings of LeakyReLU, with torch's slope and another."""
    return Activated(LEAKY_RELUS)


class Dice(nn.Module):
    """The activation of a DIN: x, or alpha * x, by the sigmoid of x over the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, eps=1e-9, affine=False)
        self.alpha = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.norm(x))
        return gate * x + (1.0 - gate) * self.alpha * x


def learned() -> nn.Module:
    """Activations with Parameters, and a LeakyReLU with a slope that no kernel takes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(48, 64), nn.LayerNorm(64), nn.PReLU(), nn.Linear(64, 64), nn.PReLU(64),
        nn.Linear(64, 64), Dice(64), nn.Linear(64, 64), nn.LeakyReLU(-0.2), nn.Linear(64, 16),
    )  # fmt: skip


def rows(batch: int) -> Tensor:
    """x (batch, 48)."""
    return torch.randn(batch, 48, generator=torch.Generator().manual_seed(batch))
