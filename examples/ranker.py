"""A small click ranker, synthetic clicks and the loss. All scripts and the policy share it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

BATCH = 512
WIDTH = 256  # of the residual blocks
DENSE = 16  # dense features
TABLES, ROWS, DIM = 15, 1000, 16  # categorical features, their values, width of an embedding


class Block(nn.Module):
    """A residual block: x + down(silu(up(norm(x))))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Ranker(nn.Module):
    """Dense features (B, DENSE) and ids (B, TABLES) to the logit (B, 1) of a click."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TABLES * ROWS, DIM)
        self.join = nn.Linear(DENSE + TABLES * DIM, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, 1)
        self.register_buffer("offsets", torch.arange(TABLES) * ROWS, persistent=False)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.join(torch.cat([dense, self.embedding(ids + self.offsets).flatten(1)], 1))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def build() -> Ranker:
    """The model; its weights are drawn from torch's generator."""
    return Ranker()


def example_inputs(batch_size: int) -> tuple[Tensor, Tensor]:
    """Inputs of the model's forward."""
    (dense, ids), _ = next(batches(batch_size, seed=0))
    return dense, ids


def batches(batch_size: int, seed: int) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
    """Endless batches ((dense, ids), clicks): a click depends on the dense features and on the ids' parity."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.linspace(-1, 1, DENSE)
    while True:
        dense = torch.randn(batch_size, DENSE, generator=random)
        ids = torch.randint(ROWS, (batch_size, TABLES), generator=random)
        logit = dense @ weight + (ids % 2 - 0.5).sum(1)
        yield (dense, ids), torch.bernoulli(logit.sigmoid(), generator=random)


def loss(logits: Tensor, clicks: Tensor) -> Tensor:
    """Mean binary cross-entropy of logits (B, 1) against clicks (B,), in float32."""
    return nn.functional.binary_cross_entropy_with_logits(logits.float().squeeze(1), clicks)
