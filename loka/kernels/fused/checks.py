"""Checks of the arguments of generated kernels, and copies of those that no kernel reads as they are.

Sizes may be symbolic, where a graph is traced.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from loka.errors import InputError


def check_rows(x: Tensor, width: int, rows: int | None = None) -> None:
    """Raises InputError unless x is a floating matrix of (M, width), with M = `rows` if given.

    Where a graph is traced, numbers of rows that come from data are not compared: the operator is opaque then, and
    compares them when it runs.
    """
    if rows is not None and x.dim() == 2 and _differ(x.shape[0], rows):
        raise InputError(
            f"a kernel for matrices of {rows} rows got one of shape {tuple(x.shape)}; the package was generated for "
            "inputs that are not broadcast: give them as many rows"
        )
    if x.dim() != 2 or x.shape[1] != width or not x.dtype.is_floating_point:
        raise InputError(
            f"a kernel for floating rows of {width} elements got {x.dtype} of shape {tuple(x.shape)}; the model is "
            "not the one that the package was generated for, generate it again"
        )


def width_of(x: Tensor, widths: Collection[int]) -> int:
    """The width of x (M, width). Raises InputError unless x is a floating matrix, and the width one of `widths`."""
    if x.dim() == 2 and x.dtype.is_floating_point:
        width = int(x.shape[1])
        if width in widths:
            return width
    *first, last = map(str, widths)
    known = f"{', '.join(first)} or {last}" if first else last
    raise InputError(
        f"a kernel for floating rows of {known} elements got {x.dtype} of shape {tuple(x.shape)}; the model is "
        "not the one that the package was generated for, generate it again"
    )


def check_vectors(width: int, *vectors: Tensor) -> None:
    """Raises InputError unless each vector has `width` elements."""
    for vector in vectors:
        if vector.numel() != width:
            raise InputError(
                f"a kernel for rows of {width} elements got a vector of shape {tuple(vector.shape)}; the model is not "
                "the one that the package was generated for, generate it again"
            )


def check_sample(x: Tensor, embeddings: int, dim: int) -> None:
    """Raises InputError unless x is floating and (B, embeddings, dim)."""
    if x.dim() != 3 or x.shape[1:] != (embeddings, dim) or not x.dtype.is_floating_point:
        raise InputError(
            f"a kernel for samples of {embeddings} embeddings of {dim} elements got {x.dtype} of shape "
            f"{tuple(x.shape)}; the model is not the one that the package was generated for, generate it again"
        )


def check_joined(*parts: Tensor, width: int) -> None:
    """Raises InputError unless each part is floating and (B, n_i, width)."""
    for part in parts:
        if part.dim() != 3 or part.shape[2] != width or not part.dtype.is_floating_point:
            raise InputError(
                f"a kernel that joins rows of {width} elements got {part.dtype} of shape {tuple(part.shape)}; the "
                "model is not the one that the package was generated for, generate it again"
            )


def whole_rows(x: Tensor) -> Tensor:
    """x (M, N) unchanged if each row is contiguous, whatever the row stride; otherwise a copy."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def whole_samples(x: Tensor) -> Tensor:
    """x (B, n, d) unchanged if each sample is contiguous, whatever the batch stride; otherwise a copy."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def check_matrix(x: Tensor) -> None:
    """Raises InputError unless x is a floating matrix."""
    if x.dim() != 2 or not x.dtype.is_floating_point:
        raise InputError(f"a kernel for a floating matrix got {x.dtype} of shape {tuple(x.shape)}; reshape it first")


def check_scale(scale: Tensor) -> None:
    """Raises InputError unless a static scale is a single float32 number in a tensor; its value is not read."""
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise InputError(
            f"a kernel with a static scale needs it as one float32 number, not {scale.dtype} of shape "
            f"{tuple(scale.shape)}; make it as torch.full((1, 1), scale, device=x.device)"
        )


def check_overflow_stats(overflow_stats: Tensor) -> None:
    """Raises InputError unless the overflow statistics are (2,) int64; their values are not read."""
    if overflow_stats.shape != (2,) or overflow_stats.dtype != torch.int64:
        raise InputError(
            "a kernel that counts what a scale does not hold needs overflow_stats of two int64, not "
            f"{overflow_stats.dtype} of shape {tuple(overflow_stats.shape)}; make them as torch.zeros(2, "
            "dtype=torch.int64, device=x.device)"
        )


def _differ(size: int, other: int) -> bool:
    """size != other, which becomes a guard where both are symbolic; False where that is not known before data are."""
    if type(size) is int and type(other) is int:
        return size != other
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # takes half a second, for sympy

    return guard_or_false(size != other)


def check_mask(mask: Tensor, x: Tensor) -> None:
    """Raises InputError unless a mask is a matrix of uint8 with the rows and columns of x."""
    if (
        mask.dtype != torch.uint8
        or mask.dim() != 2
        or mask.shape[1] != x.shape[1]
        or _differ(mask.shape[0], x.shape[0])
    ):
        raise InputError(
            f"the mask of a dropout of {tuple(x.shape)} is uint8 of that shape, not {mask.dtype} of {tuple(mask.shape)}"
        )
