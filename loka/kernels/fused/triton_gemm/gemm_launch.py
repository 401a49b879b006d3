"""Helpers of generated GEMMs: checks of arguments, alignment, number of programs.

Imported by generated packages; needs only torch and the standard library.
"""

from __future__ import annotations

from torch import Tensor

from loka.errors import InputError
from loka.kernels.fused.operators import multiprocessors

ALIGNMENT = 16  # bytes: of addresses and row strides for the tensor memory accelerator


def check_matrix(name: str, x: Tensor, rows: int | None, columns: int | None) -> None:
    """Raises InputError unless x is a matrix of (rows, columns); None means any number."""
    wanted = tuple("any" if size is None else size for size in (rows, columns))
    if x.dim() != 2 or any(size is not None and x.shape[i] != size for i, size in enumerate((rows, columns))):
        raise InputError(
            f"a product takes {name} of shape {wanted}, not {tuple(x.shape)}; the model is not the one that the "
            "package was generated for, generate it again"
        )


def aligned(x: Tensor) -> Tensor:
    """x as a contiguous tensor at an address aligned for the tensor memory accelerator, copied if necessary.

    A dimension of one element also gets its regular stride, which `contiguous` does not ensure.
    """
    x = x.contiguous().view(-1).view(x.shape)
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def programs(x: Tensor, tiles: int, per_multiprocessor: int) -> int:
    """Number of programs for `tiles` on x's device."""
    return min(tiles, per_multiprocessor * multiprocessors(x.device.index))


def with_rows(x: Tensor) -> Tensor:
    """x, or an unused row of zeros if it has no rows, as a descriptor of an empty matrix is impossible."""
    return x if x.shape[0] else x.new_zeros((1, x.shape[1]))
