"""Models that FSDP2 shards, and the policies by which their packages are generated."""

from __future__ import annotations

import torch
from torch import nn

POLICY = """\
version: 1
name: {name}
model: {{factory: "tests.support.models.sharded_models:{factory}", inputs: "tests.support.models.sharded_models:inputs",
         batch_size: 16}}
target: reference
defaults: {{compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}}
rules:
  - match: "head"
    optional: true
    compute: keep
{rules}
"""
MIXED = """\
  - match: "blocks.1.*"
    power_of_two: false
    requantize_transpose: false
"""
RECIPES = """\
  - {match: "blocks.1.*", scaling: tensorwise, requantize_transpose: false}
  - {match: "blocks.2.*", scaling: blockwise, requantize_transpose: false}
  - match: "blocks.3.*"
    scaling: tensorwise
    requantize_transpose: false
    fprop: {input: {range: static, amax: 8}}
    dgrad: {grad_output: {range: static, amax: 0.001}}
    wgrad: {input: {range: static, amax: 8}, grad_output: {range: static, amax: 0.001}}
"""
ASKED = "communication: {weights: [{match: blocks.0.*, carry: bf16}, {match: blocks.1.up, carry: native}]}"
NATIVE = "communication: {weights: [{carry: native}]}"
UNITS = "units: ['*.norm', '*.down']"
PADDED = "mods: [{use: pad_alignment, to: 16}]"
PACKAGES = (
    ("gatherable", "tower", ""),
    ("mixed", "tower", MIXED),
    ("tied", "tied", ""),
    ("odd", "odd", PADDED),
    ("stacked", "stacked", ""),
    ("asked", "tower", ASKED),
    ("native", "tower", NATIVE),
    ("units", "tower", UNITS),
    ("recipes", "tower_of_recipes", RECIPES),
)
WIDTH = 128


class Block(nn.Module):
    """A residual block of two linears, 208 wide inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 208)
        self.act, self.down = nn.SiLU(), nn.Linear(208, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Tower(nn.Module):
    """Blocks and a head of one column."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tied(nn.Module):
    """Two linears of one weight, and one that another module multiplies by, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight
        self.out, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.out.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.two(torch.tanh(self.one(x))))
        return self.head(torch.tanh(self.out(x)))


class Odd(nn.Module):
    """A linear of 120 columns, which kernels pad, and a Parameter that is read by rows and by columns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(120, WIDTH)
        self.both = nn.Parameter(torch.randn(WIDTH, WIDTH) / 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(torch.tanh(x[:, :120])))
        return nn.functional.linear(nn.functional.linear(x, self.both), self.both.t())


class Stacked(nn.Module):
    """Two matrices in one Parameter, and one in three dimensions that one call multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.both = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 12)
        self.many = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.both:
            x = torch.tanh(nn.functional.linear(x, each))
        return torch.einsum("bk,gkn->bgn", x, self.many)


def stacked() -> Stacked:
    return Stacked()


def odd() -> Odd:
    return Odd()


def tower() -> Tower:
    return Tower()


def tower_of_recipes() -> Tower:
    """A block for each recipe of RECIPES."""
    return Tower(4)


def tied() -> Tied:
    return Tied()


def inputs(rows: int) -> tuple[torch.Tensor]:
    return (torch.randn(rows, WIDTH),)
