"""Small models of the forms that policies meet, each with its inputs: for the table of numbers by policy."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """`torch.addmm` with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(64, 64) * 0.1), nn.Parameter(torch.randn(64, 64) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(x, torch.addmm(x, x, self.first.t()).relu(), self.second)


class MatrixFirst(nn.Module):
    """W @ x (B, 32, 64), which torch makes contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(32, 64) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.w, x)


class ViewedInside(MatrixFirst):
    """Takes a view in the same forward."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.w, x).view(x.shape[0], -1)


class ViewedOutside(nn.Module):
    """Takes views of what other modules return."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.out = inner, nn.Linear(32 * 64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.inner(x))
        if not isinstance(y, Tensor):  # which keeps this forward as it is
            raise TypeError
        out: Tensor = self.out(y.view(x.shape[0], -1))
        return out


class Twice(nn.Module):
    """Linears of which one is called twice, a norm that is, and tied weights: torch.compile refuses an autograd
    function that is given the same tensor twice.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))
        self.norm = nn.LayerNorm(64)
        if form == "tied":
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "linear":
            out: Tensor = self.c(self.a(torch.relu(self.a(x))))
        elif self.form == "norm":
            out = self.c(self.norm(self.b(self.norm(self.a(x)))))
        elif self.form == "around":
            out = self.c(self.norm(self.a(self.norm(x))))
        else:
            out = self.c(self.b(torch.relu(self.a(x))))
        return out


class SplitMix(nn.Module):
    """(B, 16, 32) -> (B, 16, 32); the first 8 rows of `both` are the rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.norm = nn.Parameter(torch.randn(16, 16) / 4), nn.LayerNorm(32)
        self.fc, self.out = nn.Linear(128, 256), nn.Linear(512, 16)

    def forward(self, x: Tensor) -> Tensor:
        ranked, summed = torch.split(self.both @ x, [8, 8], dim=1)
        pairs = (x @ ranked.mT).flatten(1)
        x = self.norm(torch.cat([self.fc(pairs).view(-1, 8, 32), summed], 1) + x)
        made: Tensor = self.out(x.flatten(1))
        return made


def matrix_first() -> nn.Module:
    return ViewedOutside(MatrixFirst())


def convolution() -> nn.Module:
    return ViewedOutside(nn.Conv1d(64, 32, 1))


def viewed_inside() -> nn.Module:
    return nn.Sequential(ViewedInside(), nn.Linear(32 * 64, 64))


def linear() -> nn.Module:
    return Twice("linear")


def norm() -> nn.Module:
    return Twice("norm")


def around() -> nn.Module:
    return Twice("around")


def tied() -> nn.Module:
    return Twice("tied")


def rows(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 64, generator=torch.Generator().manual_seed(1)),)


def matrices(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 64, 64, generator=torch.Generator().manual_seed(1)),)


def embeddings(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 16, 32, generator=torch.Generator().manual_seed(1)),)
