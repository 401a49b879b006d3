"""Norms that torch.nn does not have."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class BlockNorm(nn.Module):
    """RMS normalisation of each block of the last dimension, without parameters: (..., width) -> (..., width).

    A block is `block` elements, or the whole width where that is less. Raises ValueError unless blocks fill the width.
    """

    def __init__(self, width: int, block: int = 256, eps: float = 1e-6) -> None:
        super().__init__()
        self.block = min(block, width)
        self.eps = eps
        if self.block < 1 or width % self.block:
            raise ValueError(f"blocks of {self.block} do not fill a width of {width}")

    def forward(self, x: Tensor) -> Tensor:
        blocks: Tensor = x.unflatten(-1, (-1, self.block))  # type: ignore[no-untyped-call]
        return F.rms_norm(blocks, (self.block,), eps=self.eps).flatten(-2)
