"""Reshaping of tensors to the matrices that row kernels read."""

from __future__ import annotations

import torch

from loka.errors import InputError


def rows(width: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of one shape (..., width) as matrices (M, width), in the given order.

    Raises InputError if their shapes differ, even if torch would broadcast them, or end in another width.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if any(shape != shapes[0] for shape in shapes) or shapes[0][-1:] != (width,):
        raise InputError(
            f"a kernel for tensors of one shape with rows of {width} elements got the shapes "
            f"{', '.join(map(str, shapes))}; the model is not the one that the package was generated for, generate it "
            "again"
        )
    return [tensor.reshape(-1, width) for tensor in tensors]


def without_elements(x: torch.Tensor, width: int, out: int, dtype: torch.dtype) -> torch.Tensor:
    """Result (..., out) of linears for an input (..., width) that has no elements.

    Raises InputError if the input ends in another width, as torch raises a RuntimeError.
    """
    if x.shape[-1:] != (width,):
        raise InputError(
            f"a kernel for rows of {width} elements got an input of shape {tuple(x.shape)}; the model is not the one "
            "that the package was generated for, generate it again"
        )
    return x.new_zeros((*x.shape[:-1], out), dtype=dtype)


def is_empty(x: torch.Tensor) -> bool:
    """True for a tensor without elements.

    False where a graph is traced and the number of elements comes from data: the kernels and GEMMs take none as well.
    """
    if not torch.compiler.is_compiling():
        return x.numel() == 0
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # takes half a second, for sympy

    return guard_or_false(x.numel() == 0)
