"""Operands for the kernel tests: quantized matrices and their float64 product; memory and caches of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from loka.kernels import call_counters
from loka.kernels.gemm.scaled_mm import scaled_mm
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import dequantize, quantize
from tests.support.kernels.poison import poisoned


@dataclass(frozen=True)
class Recipe:
    """Formats and scalings of both operands."""

    formats: tuple[Format, Format]
    scalings: tuple[Scaling, Scaling]
    power_of_two: bool = False

    def __str__(self) -> str:
        names = [f"{f.value}_{s.value}" for f, s in zip(self.formats, self.scalings, strict=True)]
        return "-x-".join(names) + ("-pow2" if self.power_of_two else "")


@dataclass(frozen=True)
class Product:
    """Two quantized operands, and what their product is in float64."""

    recipe: Recipe
    a: Tensor
    scale_a: Tensor
    b: Tensor
    scale_b: Tensor
    exact: Tensor
    magnitude: Tensor  # |a| @ |b|.T in float64: what a rounding error of the sum is measured by

    def run(self, dtype: torch.dtype = torch.float32, fast: bool = False, counter_id: int = 0) -> Tensor:
        """The operator's result."""
        first, second = self.recipe.scalings
        return scaled_mm(
            self.a,
            self.scale_a,
            self.b,
            self.scale_b,
            first.value,
            second.value,
            dtype,
            fast=fast,
            counter_id=counter_id,
        )


def quantized_product(recipe: Recipe, a: Tensor, b: Tensor) -> Product:
    """Quantize a of (R, C) and b of (S, C) by a recipe."""
    first, second = (
        quantize(x, format=format, scaling=scaling, power_of_two=recipe.power_of_two)
        for x, format, scaling in zip((a, b), recipe.formats, recipe.scalings, strict=True)
    )
    left, right = dequantize(first).double(), dequantize(second).double().t()
    exact, magnitude = left @ right, left.abs() @ right.abs()
    return Product(recipe, first.values, first.scale, second.values, second.scale, exact, magnitude)


def random_product(recipe: Recipe, rows: int, columns: int, contraction: int, device: str = "cpu") -> Product:
    """Random operands whose rows and columns differ in magnitude, so that a misplaced scale shows."""
    generator = torch.Generator().manual_seed(rows * 7919 + columns * 104729 + contraction)
    a = torch.randn(rows, contraction, generator=generator)
    b = torch.randn(columns, contraction, generator=generator)
    for x in (a, b):
        x *= torch.logspace(-2, 2, x.shape[0]).unsqueeze(1)[torch.randperm(x.shape[0], generator=generator)]
        x *= 1.0 + torch.arange(contraction) // 128
    return quantized_product(recipe, a.to(device), b.to(device))


@pytest.fixture
def make_product() -> Callable[..., Product]:
    """`random_product`, for tests of any file."""
    return random_product


@pytest.fixture
def quantize_product() -> Callable[[Recipe, Tensor, Tensor], Product]:
    """`quantized_product`, for tests of any file."""
    return quantized_product


@pytest.fixture
def make_recipe() -> type[Recipe]:
    """The type `Recipe`, for tests of any file."""
    return Recipe


@pytest.fixture
def numbers() -> Iterator[int]:
    """The first of three fresh counter_id numbers."""
    first = call_counters.new_counters(3)
    yield first
    call_counters.reset(range(first, first + 3))


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is full of NaN, so that what a kernel leaves unwritten shows."""
    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))
