"""Widths of the rows that kernels take."""

from __future__ import annotations

from loka.errors import InputError

LARGEST_HELD = 16384  # elements of a row that a program holds in registers; wider rows are taken in chunks
LARGEST_WIDTH = 2**20


def check_width(width: int) -> None:
    """Raises InputError for rows that no kernel takes."""
    if not 1 <= width <= LARGEST_WIDTH:
        raise InputError(f"no kernel is {width} wide; rows have 1 to {LARGEST_WIDTH} elements")


def padded_width(width: int) -> int:
    """The power of two of elements that a row takes up in registers."""
    return 1 << (width - 1).bit_length()
