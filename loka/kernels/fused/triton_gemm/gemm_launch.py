"""What the host functions of generated matrix products ask of their arguments and of the device.

Imported by generated packages; needs torch and the standard library only.
"""

from __future__ import annotations

from torch import Tensor

from loka.errors import InputError
from loka.kernels.fused.operators import multiprocessors

ALIGNMENT = 16  # bytes: of the addresses and row strides that the tensor memory accelerator takes


def check_matrix(name: str, x: Tensor, rows: int | None, columns: int | None) -> None:
    """Raises InputError unless x is a matrix of (rows, columns), None being any number."""
    wanted = tuple("any" if size is None else size for size in (rows, columns))
    if x.dim() != 2 or any(size is not None and x.shape[i] != size for i, size in enumerate((rows, columns))):
        raise InputError(
            f"a product takes {name} of shape {wanted}, not {tuple(x.shape)}; the model is not the one that the "
            "package was generated for, generate it again"
        )


def aligned(x: Tensor) -> Tensor:
    """x contiguous, at an address that the tensor memory accelerator takes: copied where it is not.

    A dimension of one element has the stride that it should have, which `contiguous` leaves as it was.
    """
    x = x.contiguous().view(-1).view(x.shape)
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def programs(x: Tensor, tiles: int, per_multiprocessor: int) -> int:
    """How many programs share `tiles` on x's device."""
    return min(tiles, per_multiprocessor * multiprocessors(x.device.index))


def with_rows(x: Tensor) -> Tensor:
    """x, or one row of zeros where it has none: a descriptor of nothing cannot be made, and nothing reads this one."""
    return x if x.shape[0] else x.new_zeros((1, x.shape[1]))
