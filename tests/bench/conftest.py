"""A job small enough to train in well under a second."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from loka.bench.quality.training_job import TrainingJob
from tests.support.bench_device import short_turns

__all__ = ["short_turns"]

FEATURES, SAMPLES = 8, 1000


def rows(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features (R, FEATURES) and clicks (R,) of a fixed linear teacher."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, generator=generator)
    click = torch.rand(samples, generator=generator) < torch.sigmoid(2 * x[:, 0] - x[:, 1])
    return x, click.float()


class Batches:
    """1,000 rows, so that most batch sizes leave an odd last batch."""

    samples = SAMPLES

    def __init__(self, batch_size: int, seed: int) -> None:
        self.batch_size, self.seed = batch_size, seed

    def __len__(self) -> int:
        return -(-SAMPLES // self.batch_size)

    def __iter__(self) -> Iterator[tuple[tuple[Tensor], Tensor]]:
        x, click = rows(SAMPLES, self.seed)
        for start in range(0, SAMPLES, self.batch_size):
            stop = start + self.batch_size
            yield (x[start:stop],), click[start:stop]


def held_out(batch_size: int, seed: int) -> Batches:
    return Batches(batch_size, seed + 1000)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1), nn.Flatten(0))


@pytest.fixture
def job() -> TrainingJob:
    return TrainingJob(
        factory=model,
        batches=Batches,
        test_batches=held_out,
        loss=nn.functional.binary_cross_entropy_with_logits,
        batch_size=64,
        learning_rate=5e-2,
        ema=0.9,
        warmup=0,
    )
