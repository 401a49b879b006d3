"""MaskNet (arXiv 2102.07619): blocks that multiply their input by a mask, made of all feature embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.zoo.dlrm import over_arch


@dataclass(frozen=True, slots=True)
class MaskNetSizes:
    """Sizes of a MaskNet, whose width is `embeddings * dim`."""

    embeddings: int
    dim: int
    aggregation: int  # hidden width of the MLP that makes a mask
    block: int  # width of a block's output
    blocks: int
    parallel: bool  # all blocks read the embeddings; else each reads the one before
    over: tuple[int, ...]  # widths of the over-arch's hidden layers


MASKNET_SIZES = MaskNetSizes(
    embeddings=32, dim=64, aggregation=4096, block=1024, blocks=4, parallel=True, over=(1024, 512)
)


class MaskBlock(nn.Module):
    """relu(norm(linear(x * mask(embeddings)))): x (B, inputs), embeddings (B, width) -> (B, block)."""

    def __init__(self, inputs: int, width: int, sizes: MaskNetSizes) -> None:
        super().__init__()
        self.mask = nn.Sequential(nn.Linear(width, sizes.aggregation), nn.ReLU(), nn.Linear(sizes.aggregation, inputs))
        self.linear = nn.Linear(inputs, sizes.block, bias=False)
        self.norm = nn.LayerNorm(sizes.block)

    def forward(self, x: Tensor, embeddings: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x * self.mask(embeddings))))


class MaskNet(nn.Module):
    """Only the dense part: embeddings (B, embeddings, dim) -> logits (B, 1)."""

    def __init__(self, sizes: MaskNetSizes) -> None:
        super().__init__()
        width = sizes.embeddings * sizes.dim
        later = width if sizes.parallel else sizes.block
        self.parallel = sizes.parallel
        self.norm = nn.LayerNorm(sizes.dim)
        self.blocks = nn.ModuleList([MaskBlock(later if i else width, width, sizes) for i in range(sizes.blocks)])
        self.over = over_arch(sizes.block * (sizes.blocks if sizes.parallel else 1), sizes.over)

    def forward(self, embeddings: Tensor) -> Tensor:
        flat, x = embeddings.flatten(1), self.norm(embeddings).flatten(1)
        if self.parallel:
            x = torch.cat([block(x, flat) for block in self.blocks], 1)
        else:
            for block in self.blocks:
                x = block(x, flat)
        logits: Tensor = self.over(x)
        return logits
