"""The rule for widths that BlockNorm's block does not divide."""

from __future__ import annotations

SMALLEST = 16  # elements: a root mean square of fewer says too little of their scale


def block_of(width: int, most: int) -> int | None:
    """The largest power of two, 16 to `most`, that divides a width; None where even 16 does not.

    >>> block_of(2048, 256), block_of(3456, 256), block_of(96, 256), block_of(24, 256)
    (256, 128, 32, None)
    """
    block = min(width & -width, most)
    return block if block >= SMALLEST else None


def unsupported_block(width: int) -> str:
    """The reason where `block_of` finds none."""
    return f"its width of {width} does not divide into blocks of {SMALLEST} or more (of a power of two)"
