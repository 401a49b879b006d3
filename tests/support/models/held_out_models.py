"""A model and rows small enough to be judged in seconds; policies of tests name them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

FEATURES, BATCH, TRAIN, TEST = 8, 16, 40 * 16, 6 * 16


class Tiny(nn.Module):
    """A linear layer, a Parameter in front of the features of a sample, and a logit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 12)
        self.mix = nn.Parameter(torch.randn(3, 4) * 0.5)
        self.last = nn.Linear(9, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)).view(-1, 4, 3)
        logits: Tensor = self.last(torch.matmul(self.mix, hidden).flatten(1))
        return logits.squeeze(1)


class Numbered:
    """Rows whose first feature is the row's own number: `start` to `start + samples`."""

    def __init__(self, start: int, samples: int, batch_size: int, order: Tensor) -> None:
        generator = torch.Generator().manual_seed(start)
        self.x = torch.randn(samples, FEATURES, generator=generator)
        self.click = (self.x[:, 1] > 0).float()
        self.x[:, 0] = torch.arange(start, start + samples) / 1024
        self.batch_size, self.order = batch_size, order

    def __iter__(self) -> Iterator[tuple[tuple[Tensor], Tensor]]:
        for rows in torch.split(self.order, self.batch_size):
            yield (self.x[rows],), self.click[rows]


def inputs(batch_size: int) -> tuple[Tensor]:
    return (torch.randn(batch_size, FEATURES, generator=torch.Generator().manual_seed(0)),)


def batches(batch_size: int, seed: int) -> Numbered:
    return Numbered(0, TRAIN, batch_size, torch.randperm(TRAIN, generator=torch.Generator().manual_seed(seed)))


def test_batches(batch_size: int, seed: int) -> Numbered:
    return Numbered(TRAIN, TEST, batch_size, torch.arange(TEST))
