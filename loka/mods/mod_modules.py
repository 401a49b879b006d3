"""Modules that mods put into a model."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class BlockNorm(nn.Module):
    """RMSNorm over blocks of the last dimension, without parameters: x (..., N) -> (..., N).

    Each `block` neighbours are divided by the root of their mean square plus `eps`; N must divide by `block`. No mean
    is taken, and no statistic spans a row, so that the norm fits into the tile of a GEMM, and an outlier scales its own
    block alone (LoKA, "Mods": BlockNorm).
    """

    def __init__(self, block: int = 256, eps: float = 1e-6) -> None:
        super().__init__()
        self.block = block
        self.eps = eps

    def forward(self, y: Tensor) -> Tensor:
        """The normalised blocks, in the shape of `y`. Raises RuntimeError where the blocks do not divide its width."""
        blocks: Tensor = y.unflatten(-1, (-1, self.block))  # type: ignore[no-untyped-call]
        return F.rms_norm(blocks, (self.block,), eps=self.eps).flatten(-2)

    def extra_repr(self) -> str:
        """What stands in brackets when it is printed."""
        return f"block={self.block}, eps={self.eps}"
