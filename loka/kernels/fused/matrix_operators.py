"""The host's side of kernels of whole matrices: sums, transposed copies, weights, products; for any number of them.

The Triton kernels take a fixed number of operands, of which some may be missing: a launch fills them, and more operands
than a kernel takes are more launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from loka.devices.spec import ReduceLaunch, SquareLaunch, WeightsLaunch
from loka.kernels.fused import checks, operators
from loka.kernels.fused.kernel_values import padded_width
from loka.kernels.fused.launching import Launch, launch_by_name
from loka.kernels.fused.matrix_kernels import CastTranspose, Products, ProductsLaunch, of_the_batch
from loka.kernels.fused.norm import norm_reference
from loka.kernels.fused.norm.norm_operator import quantized
from loka.kernels.fused.operators import KernelOperator, SpecOperator
from loka.kernels.fused.quantization import ROWWISE
from loka.numerics.quantize import FORMATS


@dataclass(frozen=True)
class ReduceOperator(KernelOperator):
    """Column sums of float32 matrices, each (P, N), with a deterministic order of additions: each (N,) of `dtype`."""

    count: int  # operands of a launch, at most
    how: ReduceLaunch
    function = kernel = "reduce"
    schema = "(Tensor[] partials, ScalarType dtype) -> Tensor[]"

    def outputs(self, partials: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        return [partial.new_empty((partial.shape[1],), dtype=dtype) for partial in partials]

    def launch(self, kernels: Any, results: Sequence[Tensor], arguments: Sequence[Any], launch: Launch) -> None:
        pairs = list(zip(arguments[0], results, strict=True))
        for group in _groups(pairs, self.count):
            operands = [(partial.contiguous(), total, *partial.shape) for partial, total in group]
            blocks = sum(-(-total.shape[0] // self.how.columns) for _, total in group)
            given = _with_none(operands, self.count, tensors=2)
            sizes = (self.how.rows, self.how.columns)
            launch(kernels.reduce, (blocks,), *given, constants=sizes, num_warps=self.how.warps)

    def reference(self, partials: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        return [norm_reference.reduce(partial, dtype) for partial in partials]


@dataclass(frozen=True)
class RequantizeTransposeOperator(KernelOperator):
    """`numerics.requantize_transpose` of e4m3 matrices: values (R, C), scale (R, 1), scale_max (P,) for each of them.

    The results of each are transposed (C, R) e4m3 and scale_t (C, 1), filled with the one scale. One operand alone is a
    weight. Of several the first two are those of wgrad, a GEMM that sums over the batch's rows: their copies are (C, R
    rounded up to a multiple of 16), with zeros behind, as the GEMM takes them for any batch.
    """

    count: int  # operands of a launch, at most
    how: SquareLaunch
    function = kernel = "requantize_transpose"
    schema = "(Tensor[] operands) -> Tensor[]"

    def outputs(self, operands: Sequence[Tensor]) -> list[Tensor]:
        results = []
        for place, values in enumerate(operands[::3]):
            m, n = values.shape
            m_t = -(-m // 16) * 16 if place < of_the_batch(len(operands) // 3) else m
            results += [values.new_empty((n, m_t)), values.new_empty((n, 1), dtype=torch.float32)]
        return results

    def launch(self, kernels: Any, results: Sequence[Tensor], arguments: Sequence[Any], launch: Launch) -> None:
        (operands,) = arguments
        matrices = list(zip(operands[::3], operands[1::3], operands[2::3], results[::2], results[1::2], strict=True))
        for group in _groups(matrices, self.count):
            given = [
                (values.contiguous(), scale, scale_max, copy, scale_t, *values.shape, copy.shape[1], scale_max.shape[0])
                for values, scale, scale_max, copy, scale_t in group
            ]
            tiles = sum(_tiles(values, self.how.tile) for values, *_ in group)
            sizes = (self.how.tile, self.how.chunk)
            flat = _with_none(given, self.count, tensors=5)
            launch(kernels.requantize_transpose, (tiles,), *flat, constants=sizes, num_warps=self.how.warps)

    def reference(self, operands: Sequence[Tensor]) -> list[Tensor]:
        results: list[Tensor] = []
        for place, (values, scale) in enumerate(zip(operands[::3], operands[1::3], strict=True)):
            batch = place < of_the_batch(len(operands) // 3)
            results += norm_reference.requantize_transpose(values, scale, of_the_batch=batch)
        return results


@dataclass(frozen=True)
class TransposeOperator(KernelOperator):
    """Transposed copies (C, R) of FP8 matrices (R, C) with one scale each."""

    count: int  # operands of a launch, at most
    how: SquareLaunch
    function = kernel = "transpose"
    schema = "(Tensor[] values) -> Tensor[]"

    def outputs(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [each.new_empty((each.shape[1], each.shape[0])) for each in values]

    def launch(self, kernels: Any, results: Sequence[Tensor], arguments: Sequence[Any], launch: Launch) -> None:
        for group in _groups(list(zip(arguments[0], results, strict=True)), self.count):
            given = [(values.contiguous(), copy, *values.shape) for values, copy in group]
            tiles = sum(_tiles(values, self.how.tile) for values, _ in group)
            flat = _with_none(given, self.count, tensors=2)
            launch(kernels.transpose, (tiles,), *flat, constants=(self.how.tile,), num_warps=self.how.warps)

    def reference(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [norm_reference.transpose(each) for each in values]


@dataclass(frozen=True)
class QuantizeWeightsOperator(KernelOperator):
    """Weights in e4m3, each with one power-of-two scale a row: the bits of each one's quantizer, in one launch.

    For each weight (M, K), of any floating dtype, of which K is one of `columns`: values (M, columns[K]) e4m3, with
    zeros behind; scale (M, 1); scale_max (P,), the largest scale that each of the weight's programs wrote.
    """

    columns: Mapping[int, int]  # of the values, by the width of a weight
    count: int  # weights of a launch, at most
    how: WeightsLaunch
    function = kernel = "quantize_weights"
    schema = "(Tensor[] weights) -> Tensor[]"

    def blocks(self, widths: Sequence[int]) -> tuple[list[tuple[int, int, int, int]], int, int]:
        """For weights of these widths: width, columns, padded columns and rows of a step; warps; programs of an SM."""
        columns = [self.columns[width] for width in widths]
        padded = [padded_width(each) for each in columns]
        warps = min(max(1, max(padded) // self.how.warp_elements), self.how.most_warps)
        elements = max(warps * self.how.warp_elements, *padded)
        rows = [elements // max(each, self.how.least_columns) for each in padded]
        return list(zip(widths, columns, padded, rows, strict=True)), warps, max(1, self.how.warps // warps)

    def outputs(self, weights: Sequence[Tensor]) -> list[Tensor]:
        blocks, _, most = self.blocks([checks.width_of(weight, self.columns) for weight in weights])
        results = []
        for weight, (_, columns, _, rows) in zip(weights, blocks, strict=True):
            m, programs = weight.shape[0], operators.programs(weight, rows, most)
            values = weight.new_empty((m, columns), dtype=FORMATS[ROWWISE.format].dtype)
            scale = weight.new_empty((m, 1), dtype=torch.float32)
            results += [values, scale, weight.new_empty((programs,), dtype=torch.float32)]
        return results

    def launch(self, kernels: Any, results: Sequence[Tensor], arguments: Sequence[Any], launch: Launch) -> None:
        blocks, warps, _ = self.blocks([int(weight.shape[1]) for weight in arguments[0]])
        weights = list(zip(arguments[0], results[::3], results[1::3], results[2::3], blocks, strict=True))
        for group in _groups(weights, self.count):
            given, sizes, programs = [], [], 0
            for weight, values, scale, scale_max, block in group:
                rows = checks.whole_rows(weight)
                given.append((rows, values, scale, scale_max, rows.stride(0), *rows.shape, scale_max.shape[0]))
                sizes.append(block)
                programs += scale_max.shape[0]
            flat = _with_none(given, self.count, tensors=4)
            missing = [(1, 1, 1, 1)] * (self.count - len(group))
            constants = (*chain.from_iterable([*sizes, *missing]), ROWWISE.limit)
            launch(kernels.quantize_weights, (programs,), *flat, constants=constants, num_warps=warps)

    def reference(self, weights: Sequence[Tensor]) -> list[Tensor]:
        results: list[Tensor] = []
        for weight in weights:
            behind = self.columns[weight.shape[1]] - weight.shape[1]
            rows = torch.nn.functional.pad(weight, (0, behind)) if behind else weight
            results += norm_reference.quantize_rows(rows)
        return results


@dataclass(frozen=True)
class ProductsOperator(SpecOperator):
    """`Products`: sums of matrices and of products of two."""

    spec: Products
    how: ProductsLaunch
    kernel = "products"
    dtype = "ScalarType dtype"

    @property
    def count(self) -> int:
        """Matrices, and pairs of them, that the kernel has parameters for."""
        return max(self.spec.plain, len(self.spec.adds))

    def outputs(self, *arguments: Any) -> Tensor:
        *tensors, dtype = arguments
        for name, tensor in zip(self.spec.parameters, tensors, strict=True):
            if not name.startswith("add_"):
                checks.check_rows(tensor, self.spec.width, tensors[0].shape[0])
        made: Tensor = tensors[0].new_empty((tensors[0].shape[0], self.spec.width), dtype=dtype)
        return made

    def launch(self, kernels: Any, results: Sequence[Tensor], arguments: Sequence[Any], launch: Launch) -> None:
        (out,) = results
        if out.shape[0] > 0:
            tensors = [tensor.contiguous() for tensor in arguments[:-1]]
            values = dict(zip(self.spec.parameters, tensors, strict=True))
            values |= {"out": out, "WIDTH": self.spec.width, "COLUMNS": self.how.columns}
            grid = (out.shape[0], -(-self.spec.width // self.how.columns))
            launch_by_name(launch, kernels.products, grid, values, self.how.warps)

    def reference(self, *arguments: Any) -> Tensor:
        *tensors, dtype = arguments
        named = dict(zip(self.spec.parameters, tensors, strict=True))
        pairs = [(named[f"grad_{i}"], named[f"x_{i}"], named.get(f"add_{i}")) for i in range(len(self.spec.adds))]
        return norm_reference.products(tensors[: self.spec.plain], pairs, dtype)


@dataclass(frozen=True)
class CastTransposeOperator(SpecOperator):
    """`CastTranspose`: a matrix and its transpose in FP8 under one scale."""

    spec: CastTranspose
    how: SquareLaunch
    kernel = "cast_transpose"

    def outputs(self, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        checks.check_matrix(x)
        for name, tensor in zip(self.spec.how.parameters, given, strict=True):
            if name == "scale":
                checks.check_scale(tensor)
            elif name == "overflow_stats":
                checks.check_overflow_stats(tensor)
        m, n = x.shape
        fp8, float32 = FORMATS[self.spec.how.format].dtype, torch.float32
        tiles = (operators.tiles(x, self.how.tile),)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "values": ((m, n), fp8),
            "transposed": ((n, m), fp8),
            "scale": ((1, 1), float32),
            "amax": (tiles, float32),
            "overflow": (tiles, torch.int32),
        }
        return tuple([x.new_empty(shapes[name][0], dtype=shapes[name][1]) for name in self.spec.results])

    def launch(self, kernels: Any, results: Sequence[Tensor], arguments: Sequence[Any], launch: Launch) -> None:
        how, x = self.spec.how, arguments[0].contiguous()
        values = dict(zip((*self.spec.parameters, *self.spec.results), (x, *arguments[1:], *results), strict=True))
        values |= {"m": x.shape[0], "n": x.shape[1], "SIDE": self.how.tile, "SCALING": how.scaling}
        values |= {"parts": values["maxima"].shape[0] if "maxima" in values else 0}
        values |= {"LIMIT": how.limit, "POWER_OF_TWO": how.power_of_two}
        launch_by_name(launch, kernels.cast_transpose, (operators.tiles(x, self.how.tile),), values, self.how.warps)

    def reference(self, x: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        values, *rest = quantized(self.spec.how, x, *given)
        return values, values.t().clone(memory_format=torch.contiguous_format), *rest


def _groups(items: Sequence[Any], count: int) -> list[Sequence[Any]]:
    """The items, `count` at a time."""
    return [items[start : start + count] for start in range(0, len(items), count)]


def _with_none(operands: Sequence[tuple[Any, ...]], count: int, tensors: int) -> list[Any]:
    """The operands' arguments in a row, and None and 0 for those that are missing; `tensors` come first in each."""
    missing = (None,) * tensors + (0,) * (len(operands[0]) - tensors)
    return list(chain.from_iterable([*operands, *[missing] * (count - len(operands))]))


def _tiles(x: Tensor, side: int) -> int:
    return max(-(-x.shape[0] // side), 1) * max(-(-x.shape[1] // side), 1)
