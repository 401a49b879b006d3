"""Small models in the manner of public recommenders: towers of BatchNorm, loops over dicts, forwards half traceable."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BranchingModel(nn.Module):
    """A forward that branches on a tensor's value, around towers that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.tower = nn.Sequential(nn.Linear(32, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if x.sum() > 1e9:
            x = x * 2
        out: Tensor = self.head(self.tower(x))
        return out


class BranchingLayer(nn.Module):
    """A layer that cannot be traced as a whole, around a tower that can."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tower(x)
        if x.sum() > 1e9:
            x = x * 2
        return F.silu(x)


class AroundABranch(nn.Module):
    """A traceable forward with such a layer in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.enter_norm = nn.Linear(32, 16), nn.LayerNorm(16)
        self.layer = BranchingLayer()
        self.leave, self.leave_norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(F.relu(self.enter_norm(self.enter(x))))
        out: Tensor = self.head(F.relu(self.leave_norm(self.leave(x))))
        return out


def rows(batch_size: int) -> tuple[Tensor]:
    """One matrix, 32 wide."""
    return (torch.randn(batch_size, 32),)


class BatchNormTower(nn.Module):
    """An MLP of Linear, BatchNorm, ReLU and Dropout, its layers in lists."""

    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        widths = (32, 16, 16)
        self.linears = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise(widths)])
        self.bn = nn.ModuleList([nn.BatchNorm1d(width) for width in widths[1:]])
        self.activations = nn.ModuleList([nn.ReLU(inplace=True) for _ in widths[1:]])
        self.dropout = nn.Dropout(p)
        self.head = nn.Linear(widths[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.linears)):
            x = self.dropout(self.activations[i](self.bn[i](self.linears[i](x))))
        out: Tensor = self.head(x)
        return out


class OwnBatchNorm(nn.BatchNorm1d):
    """A subclass, whose forward nobody knows."""


def _with(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 16), norm, nn.ReLU(), nn.Linear(16, 1))


def batch_norm_without_running() -> nn.Module:
    """The batch's statistics in evaluation, too."""
    return _with(nn.BatchNorm1d(16, track_running_stats=False))


def batch_norm_of_its_own() -> nn.Module:
    return _with(OwnBatchNorm(16))


def batch_norm_with_a_hook() -> nn.Module:
    norm = nn.BatchNorm1d(16)
    norm.register_forward_hook(lambda module, args, result: None)
    return _with(norm)


def batch_norm_called_twice() -> nn.Module:
    norm = nn.BatchNorm1d(16)
    return nn.Sequential(nn.Linear(32, 16), norm, nn.ReLU(), nn.Linear(16, 16), norm, nn.ReLU(), nn.Linear(16, 1))


def idle_tower() -> nn.Module:
    """Modules that return their input between linears and activations."""
    return nn.Sequential(
        nn.Linear(32, 16), nn.Identity(), nn.ReLU(), nn.Dropout(0.0),
        nn.Linear(16, 16), nn.Dropout(0.0), nn.LayerNorm(16), nn.Identity(), nn.ReLU(), nn.Dropout(0.0),
        nn.Linear(16, 1),
    )  # fmt: skip


def prelu_tower() -> nn.Module:
    """Activations that no kernel takes."""
    return nn.Sequential(
        nn.Linear(32, 16), nn.LayerNorm(16), nn.PReLU(16), nn.Linear(16, 16), nn.ELU(), nn.Linear(16, 1)
    )


class Elementwise(nn.Module):
    """A sum behind an activation, a product with a number, and a product behind a BatchNorm: no kernel takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        one, two, three, four = self.linears
        y = torch.relu(one(x)) + x
        y = two(y) * 0.5
        return four(self.norm(three(y)) * x)


class FunctionalDropout(nn.Module):
    """A dropout by torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.dropout(F.relu(self.up(x)), 0.1, self.training))
        return out


class NoInteraction(nn.Module):
    """A product with a Parameter, and a norm of a sum of matrices: nearly a join."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 16) * 0.1)
        self.block, self.head = ResidualNorm(), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(F.relu(x @ self.weight)))
        return out


class ResidualNorm(nn.Module):
    """norm(x + f(x)) of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.linear(x) + x)
        return out
