"""Norms that mods put into a model: BlockNorm, the size of its blocks, and checkpoints without Parameters of norms."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from loka.mods.adaptation import Unchanged

SMALLEST = 16  # elements: the root mean square of fewer is a poor estimate of their scale


class BlockNorm(nn.Module):
    """RMSNorm over blocks of the last dimension, without parameters: x (..., N) -> (..., N).

    Each block of `block` neighbours is divided by the root of its mean square plus `eps`; `block` must divide N. No
    mean is subtracted, and no statistic spans a row, so that the norm fits into the tile of a GEMM, and an outlier
    scales only its own block (LoKA, "Mods": BlockNorm).
    """

    def __init__(self, block: int = 256, eps: float = 1e-6) -> None:
        super().__init__()
        self.block = block
        self.eps = eps

    def forward(self, y: Tensor) -> Tensor:
        """The normalised blocks, in the shape of `y`. Raises RuntimeError where `block` does not divide its width."""
        blocks: Tensor = y.unflatten(-1, (-1, self.block))  # type: ignore[no-untyped-call]
        return F.rms_norm(blocks, (self.block,), eps=self.eps).flatten(-2)

    def extra_repr(self) -> str:
        """The settings in the module's repr."""
        return f"block={self.block}, eps={self.eps}"


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
