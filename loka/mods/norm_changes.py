"""Helpers of mods that change norms: blocks of a BlockNorm, and checkpoints without a norm's Parameters."""

from __future__ import annotations

from torch import Tensor

from loka.mods.adaptation import Unchanged

SMALLEST = 16  # elements: the root mean square of fewer is a poor estimate of their scale


def block_of(width: int, most: int) -> int | None:
    """The largest power of two, 16 to `most`, that divides a width; None if 16 does not.

    >>> block_of(2048, 256), block_of(3456, 256), block_of(96, 256), block_of(24, 256)
    (256, 128, 32, None)
    """
    block = min(width & -width, most)
    return block if block >= SMALLEST else None


def unsupported_block(width: int) -> str:
    """The reason if `block_of` finds no block."""
    return f"its width of {width} does not divide into blocks of {SMALLEST} or more (of a power of two)"


def without_affine(state: dict[str, Tensor], name: str) -> tuple[Unchanged, ...]:
    """Remove a norm's weight and bias from a state_dict, and return those that are not ones and zeros."""
    lost = []
    for part, neutral in (("weight", 1.0), ("bias", 0.0)):
        key = f"{name}.{part}" if name else part
        value = state.pop(key, None)
        if value is not None and (value.is_meta or not bool((value == neutral).all())):
            size = (
                "" if value.is_meta else f", up to {float((value.detach() - neutral).abs().max()):.3g} off {neutral:g}"
            )
            lost.append(Unchanged(key, f"a norm's {part}{size}, which the adapted model has no place for"))
    return tuple(lost)
