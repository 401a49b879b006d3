"""A tower of blocks, LayerNorm -> Linear -> SiLU -> Linear, for counting what a training step launches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BLOCKS, WIDTH = 6, 256
POLICY = """\
version: 1
name: blocks
model:
  factory: "tests.support.models.block_tower:block_tower"
  inputs: "tests.support.models.block_tower:tower_rows"
  batch_size: 64
defaults: {compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}
rules: [{match: {max_n: 16}, compute: keep}]
"""


class Block(nn.Module):
    """x (M, WIDTH) -> x + linear(SiLU(linear(LayerNorm(x))))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.act = nn.SiLU()
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return out


def block_tower() -> nn.Module:
    """Six blocks, a LayerNorm and a linear to a single column."""
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))


def tower_rows(batch: int) -> Tensor:
    """A batch of rows, the same each time."""
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(0))
