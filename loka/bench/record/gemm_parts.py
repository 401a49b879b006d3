"""GEMM parts: operands, the call of a kernel, and the check of its results.

Operands are standard normal, a (rows, contraction) and b (columns, contraction), both contiguous. Those of the last
size are kept, so parts of one size should follow each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from loka.bench.device import float32_products
from loka.bench.record.check_numbers import Check, check_product, spaced
from loka.bench.timing import SEED
from loka.devices.targets import DEFAULT
from loka.errors import InputError
from loka.kernels import call_counters
from loka.kernels.gemm.catalogue import GemmRequest, kernel_named, operator_named
from loka.kernels.measurements.parts import Part
from loka.numerics.enums import Accumulation, Format, Gemm, Scaling
from loka.numerics.quantize import Quantized, quantize
from loka.numerics.recipe import OperandRecipe
from loka.numerics.scalings import BLOCKS

SCALED_MM, NATIVE, FBGEMM = "torch.scaled_mm", "as-is", "fbgemm.rowwise"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A part that is ready to be timed: the call, its arguments and a check of its result."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    check: Callable[[Any], Check]
    parts: int = 1  # number of equal parts in one call; the time is divided by it
    less: Callable[..., Any] | None = None  # work included in the call whose time is subtracted; same arguments


@dataclass(frozen=True, slots=True)
class GemmPartRecipe:
    """Recipe of a GEMM: of both operands, and whether accumulation is fast."""

    operands: tuple[OperandRecipe, OperandRecipe]
    accumulation: Accumulation

    @property
    def fast(self) -> bool:
        """True for fast accumulation."""
        return self.accumulation is Accumulation.FAST


def parse_recipe(text: str) -> GemmPartRecipe:
    """Parse a recipe such as "e4m3 rowwise, e4m3 rowwise, precise". Raises InputError."""
    try:
        first, second, accumulation = text.split(", ")
        return GemmPartRecipe((_operand(first), _operand(second)), Accumulation(accumulation))
    except ValueError as error:
        raise InputError(
            f"a GEMM has no recipe {text!r} ({error}); write FORMAT SCALING, FORMAT SCALING, ACCUMULATION, as in "
            "'e4m3 rowwise, e4m3 rowwise, precise'"
        ) from error


def _operand(text: str) -> OperandRecipe:
    format, scaling = text.split(" ")
    return OperandRecipe(format=Format(format), scaling=Scaling(scaling))


class GemmOperands:
    """Operands of the GEMM parts of one size and dtype, and the float64 product of sampled rows and columns."""

    def __init__(self, part: Part, device: str) -> None:
        generator = torch.Generator(device).manual_seed(SEED)
        self.key = size_key(part)
        draw = partial(torch.randn, device=device, dtype=torch.bfloat16, generator=generator)
        self.plain = tuple(draw(rows, part.contraction).to(DTYPES[part.dtype]) for rows in (part.rows, part.columns))
        self._places = tuple(spaced(rows).to(device) for rows in (part.rows, part.columns))
        self._exact = self._product(*(x[places] for x, places in zip(self.plain, self._places, strict=True)))
        self._quantized: dict[tuple[int, OperandRecipe], Quantized] = {}
        self._own: dict[GemmPartRecipe, Tensor] = {}

    def quantized(self, recipe: GemmPartRecipe) -> tuple[Quantized, Quantized]:
        """Both operands in FP8, quantized once for each recipe."""
        return self._one(0, recipe), self._one(1, recipe)

    def check(self, found: Tensor, recipe: GemmPartRecipe | None) -> Check:
        """Check a product (rows, columns) of the quantized operands, or of the plain ones if `recipe` is None."""
        sample = found[self._places[0]][:, self._places[1]]
        own = self._exact if recipe is None else self._own_product(recipe)
        return check_product(sample, self._exact, own, fast=recipe is not None and recipe.fast)

    def _one(self, index: int, recipe: GemmPartRecipe) -> Quantized:
        wanted = recipe.operands[index]
        if (index, wanted) not in self._quantized:
            self._quantized[index, wanted] = quantize(
                self.plain[index],
                format=wanted.format,
                scaling=wanted.scaling,
                power_of_two=wanted.power_of_two,
            )
        return self._quantized[index, wanted]

    def _own_product(self, recipe: GemmPartRecipe) -> Tensor:
        if recipe not in self._own:
            pairs = zip(self.quantized(recipe), recipe.operands, self._places, strict=True)
            sampled = [_sampled(made, operand.scaling, places) for made, operand, places in pairs]
            self._own[recipe] = self._product(*sampled)
        return self._own[recipe]

    @staticmethod
    def _product(a: Tensor, b: Tensor) -> Tensor:
        return a.double() @ b.double().t()


def _sampled(made: Quantized, scaling: Scaling, places: Tensor) -> Tensor:
    """Dequantize some rows of a matrix to float32."""
    block, values = BLOCKS[scaling], made.values[places].float()
    scale = made.scale if block.rows is None else made.scale[places // block.rows]
    if block.columns is not None:
        scale = scale.repeat_interleave(block.columns, dim=1)[:, : values.shape[1]]
    return values * scale


def size_key(part: Part) -> tuple[int, int, int, str]:
    """Key of the parts that share operands: sizes and dtype."""
    return part.rows, part.columns, part.contraction, part.dtype


@cache
def unavailable_reason(kernel: str) -> str | None:
    """Reason why a kernel cannot run on this machine, or None; cached."""
    return kernel_named(kernel).unavailable_reason()


class Gemms:
    """Prepares GEMM parts: native ones, and those on kernels of the catalogue that have an operator."""

    def __init__(self, device: str = "cuda", target: str = DEFAULT.name) -> None:
        """`target` is the device for which kernels state what they support."""
        self._device = device
        self._target = target
        self._operands: GemmOperands | None = None
        self._counter_id = call_counters.new_counters(1)

    def operands(self, part: Part) -> GemmOperands:
        """Operands of the part's size; those of the last size are kept."""
        if self._operands is None or self._operands.key != size_key(part):
            self._operands = None  # frees its memory first
            self._operands = GemmOperands(part, self._device)
        return self._operands

    def prepare(self, part: Part) -> PreparedCall:
        """Prepare a part's call.

        Raises InputError if the kernel does not support the part or cannot run on this machine.
        """
        if part.dtype not in DTYPES:
            raise InputError(f"no GEMM writes {part.dtype!r}; it can be {', '.join(DTYPES)}")
        if part.kernel == NATIVE:
            operands = self.operands(part)
            return PreparedCall(plain_product, operands.plain, lambda found: operands.check(found, None))
        recipe = parse_recipe(part.recipe)
        call = self._of_catalogue(part, recipe)
        operands = self.operands(part)
        a, b = operands.quantized(recipe)
        arguments = (a.values, a.scale, b.values, b.scale)
        return PreparedCall(call, arguments, lambda found: operands.check(found, recipe))

    def _of_catalogue(self, part: Part, recipe: GemmPartRecipe) -> Callable[..., Tensor]:
        """The operator of a kernel, called as in generated code."""
        kernel = kernel_named(part.kernel)
        sizes = (part.rows, part.contraction, part.columns)
        wanted = GemmRequest(Gemm.FPROP, recipe.operands, recipe.accumulation, True, *sizes, self._target, part.dtype)
        refusal = kernel.unsupported_reason(wanted)
        if refusal is None and self._device == "cuda":
            refusal = unavailable_reason(part.kernel)
        if refusal is not None:
            raise InputError(f"{part.kernel}: {refusal}")
        operator, counter_id = operator_named(part.kernel), self._counter_id
        names, dtype = [operand.scaling.value for operand in recipe.operands], DTYPES[part.dtype]

        def call(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
            out: Tensor = operator(a, scale_a, b, scale_b, names[0], names[1], dtype, recipe.fast, counter_id)
            return out

        return call


def plain_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T; float32 matrices are multiplied in TF32."""
    with float32_products("high"):
        return torch.mm(a, b.t())
