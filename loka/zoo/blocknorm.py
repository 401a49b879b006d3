"""BlockNorm: RMSNorm over fixed blocks of the last dimension, without parameters."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class BlockNorm(nn.Module):
    """x (..., N) -> (..., N), each block of `block` neighbours divided by its root mean square; N must divide by it."""

    def __init__(self, block: int = 256, eps: float = 1e-6) -> None:
        super().__init__()
        self.block = block
        self.eps = eps

    def forward(self, y: Tensor) -> Tensor:
        blocks: Tensor = y.unflatten(-1, (-1, self.block))  # type: ignore[no-untyped-call]
        return F.rms_norm(blocks, (self.block,), eps=self.eps).flatten(-2)
