"""A call that multiplies matrices, as y = x @ weight.T with x of M x K and weight of N x K."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from loka.graph.sites.site import GemmKind
from loka.graph.sites.sizes import Size, is_one


@dataclass(frozen=True, slots=True)
class TensorOrigin:
    """Origin of an operand of a product."""

    parameter: str | None  # qualified name, if the operand is a Parameter, a matrix in one, or the transpose of either
    computed_from: str = ""  # "Parameter 'w' by getitem", "buffer 'mask'", or "" for an activation
    copied: bool = False  # True for the same matrix for each sample, of three dimensions

    @property
    def fixed(self) -> bool:
        """True for what does not depend on the inputs."""
        return self.parameter is not None or bool(self.computed_from)


class TensorOrigins(Protocol):
    """Function that gives the origin of a tensor."""

    def __call__(self, tensor: Tensor) -> TensorOrigin:
        """The origin of `tensor`."""


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """One call that multiplies matrices. `terms` are its (M, K, N), whose multiply-adds sum up to the call's."""

    kind: GemmKind
    x: Tensor | None
    weight: str | None
    bias: Tensor | None
    m: Size
    k: Size
    n: Size
    terms: tuple[tuple[Size, Size, Size], ...]
    blocked: str | None = None
    folded: bool = False  # the columns of the product are several dimensions


Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Describe = Callable[[Args, Kwargs, TensorOrigins], MatrixProduct | None]


def argument(args: Args, kwargs: Kwargs, position: int, *names: str) -> Any:
    """An argument by its position, or by the first of its names that is given; None where it is not given."""
    if position < len(args):
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), None)


def unpatchable(weight: Tensor, dimensions: int | None = None) -> str | None:
    """Reason why a Parameter cannot be an FP8 weight by itself; None where it can.

    `dimensions` are those without that of the samples.
    """
    dimensions = weight.dim() if dimensions is None else dimensions
    if dimensions != 2:
        return f"its weight has {dimensions} dimensions, not two"
    if not weight.dtype.is_floating_point:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    return None if weight.layout == torch.strided else "its weight is sparse"


def is_single(weight: Tensor) -> bool:
    """True for one matrix of three dimensions, (1, K, N)."""
    return weight.dim() == 3 and is_one(weight.shape[0])


# Rows and columns of a matrix that may be a GEMM of its own: with 64 FP8 never wins, with 128 from some thousand rows
# on (docs/results/crossover-2026-11-21.md).
LEAST = 128
MOST = 64  # matrices that are GEMMs of their own


def grouped(weight: Tensor, name: str) -> str:
    """Why a Parameter that holds a matrix for each of several groups of rows is no site for each of them.

    The others are split (`loka.graph.sites.groups`).
    """
    *groups, rows, columns = weight.shape
    count = math.prod(groups)
    gemms = f"{count} GEMMs" if count != 1 else "a GEMM"
    said = f"its weight '{name}' has {weight.dim()} dimensions: {gemms} in one call (a grouped GEMM)"
    if min(rows, columns) < LEAST:
        return f"{said}, of {rows} x {columns} each: LoKA splits it from {LEAST} x {LEAST} on"
    if count > MOST:
        return f"{said}: LoKA splits it into up to {MOST}"
    return f"{said}: LoKA splits `x @ W`, bmm and einsum by a Parameter of three dimensions as it is"


def product_of(
    kind: GemmKind, x: Tensor, weight: Tensor, origin: TensorOrigin, mkn: tuple[Size, Size, Size], bias: Any = None
) -> MatrixProduct:
    """A product with a known weight operand."""
    blocked = unpatchable(weight, weight.dim() - (origin.copied or is_single(weight)))
    if blocked is None and not x.dtype.is_floating_point:
        blocked = f"its input is {str(x.dtype).removeprefix('torch.')}"
    return MatrixProduct(kind, x, origin.parameter, bias, *mkn, (mkn,), blocked)


def no_weight(a: Tensor, b: Tensor, origins: TensorOrigins) -> str:
    """Reason why neither operand can be an FP8 weight."""
    of_a, of_b = origins(a), origins(b)
    if of_a.parameter and of_b.parameter:
        return f"both operands are Parameters ('{of_a.parameter}', '{of_b.parameter}'): no input takes part"
    weight, one = (b, of_b) if of_b.fixed else (a, of_a)
    if one.parameter:
        few = f"its weight '{one.parameter}' does not have two dimensions"
        return grouped(weight, one.parameter) if weight.dim() > 2 else few
    if one.computed_from:
        return f"its weight is computed from {one.computed_from}"
    return "both operands are computed: no Parameter takes part"
