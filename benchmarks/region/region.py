"""Regions: one or two linears with norms and activations around them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn

from benchmarks.packages import Subject
from benchmarks.region.region_bound import RooflineChain
from benchmarks.replays import MEASURED_MS
from benchmarks.steps import StepWork, make_work
from loka.bench.timing import SEED
from loka.errors import InputError
from loka.mods.norms import BlockNorm

BLOCK = 256


class Form(StrEnum):
    """The operations of a region."""

    LAYER_NORM = "layer-norm"  # LayerNorm -> Linear (no bias) -> LayerNorm -> sigmoid
    BLOCK_NORM = "block-norm"  # Linear (no bias) -> BlockNorm -> Hard Swish -> Linear (no bias)
    BATCH_NORM = "batch-norm"  # Linear -> BatchNorm -> ReLU -> Linear
    DROPOUT = "batch-norm-dropout"  # the same with a dropout of 0.1 before the second linear


@dataclass(frozen=True, slots=True)
class Shape:
    """x of (m, k), a weight of (n, k); the second weight of forms with two linears is (n, n)."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k}"


DEFAULT_SHAPES = (
    Shape(4096, 512, 512),
    Shape(16384, 512, 512),
    Shape(8192, 1024, 1024),
    Shape(2048, 2048, 2048),
    Shape(8192, 2048, 2048),
    Shape(16384, 2048, 2048),
    Shape(8192, 4096, 4096),
)


class LayerNormRegion(nn.Module):
    """LayerNorm -> Linear (no bias) -> LayerNorm -> sigmoid: (M, K) -> (M, N)."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(k)
        self.linear = nn.Linear(k, n, bias=False)
        self.after = nn.LayerNorm(n)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.after(self.linear(self.before(x))))


class BlockNormRegion(nn.Module):
    """Linear (no bias) -> BlockNorm(256) -> Hard Swish -> Linear (no bias): (M, K) -> (M, N)."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.up = nn.Linear(k, n, bias=False)
        self.norm = BlockNorm(BLOCK)
        self.activation = nn.Hardswish()
        self.down = nn.Linear(n, n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.norm(self.up(x))))
        return out


def build(form: Form, k: int, n: int) -> nn.Module:
    """The region's module, with weights from torch's generator."""
    match form:
        case Form.LAYER_NORM:
            return LayerNormRegion(k, n)
        case Form.BLOCK_NORM:
            return BlockNormRegion(k, n)
        case Form.BATCH_NORM | Form.DROPOUT:
            dropout = [nn.Dropout(0.1)] if form is Form.DROPOUT else []
            return nn.Sequential(nn.Linear(k, n), nn.BatchNorm1d(n), nn.ReLU(), *dropout, nn.Linear(n, n))


def parse_shape(text: str) -> Shape:
    """Parse M,N,K such as "8192,2048,1024", or M,N with K = N. Raises InputError."""
    parts = re.split(r"[,x]", text)
    if len(parts) not in (2, 3) or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"{text!r} is no shape; write M,N,K like 8192,2048,2048, or M,N for K = N")
    m, n, *rest = map(int, parts)
    return Shape(m, n, rest[0] if rest else n)


def check_shape(form: Form, shape: Shape) -> None:
    """Raise InputError if the form cannot have the shape."""
    if form is Form.BLOCK_NORM and shape.n % BLOCK:
        raise InputError(f"N = {shape.n} is no multiple of {BLOCK}, a block of the block-norm form")


def chain_of(form: Form, shape: Shape) -> RooflineChain:
    """The region's linears and elementwise passes, for its bound."""
    if form is Form.LAYER_NORM:
        return RooflineChain(shape.m, (shape.k, shape.n), before=True, after=True)
    return RooflineChain(shape.m, (shape.k, shape.n, shape.n), before=False, after=False)


def subject(form: Form, shape: Shape) -> Subject:
    """The region as a Subject to generate a package for."""
    source = f'''\
"""The region {form.value} at {shape}, for the planner."""

import torch

from benchmarks.region import region


def build():
    return region.build(region.Form({form.value!r}), {shape.k}, {shape.n})


def inputs(batch_size):
    return (torch.randn(batch_size, {shape.k}, requires_grad=True),)
'''
    return Subject(f"{form.name.lower()}_{shape.m}_{shape.n}_{shape.k}", source, shape.m)


def work_of(form: Form, shape: Shape, modes: tuple[bool, ...]) -> StepWork:
    """The region with weights and an input of a fixed seed, on the GPU."""
    torch.manual_seed(SEED)
    base = build(form, shape.k, shape.n).cuda()
    return make_work(str(shape), base, (torch.randn(shape.m, shape.k, device="cuda"),), modes, MEASURED_MS)
