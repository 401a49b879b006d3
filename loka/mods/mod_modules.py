"""Modules that mods insert into a model."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


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
