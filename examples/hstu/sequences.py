"""An HSTU over MovieTweetings: what a user rated before and the candidate movie, to the logit that it is liked.

The past is for training and the future for testing, as loka.zoo.movietweetings splits it; a sequence holds only what
came before its row. Initial weights are those of the public block (generative_recommenders/modeling/sequential).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from loka.zoo import movietweetings
from loka.zoo.hstu import HSTURanker, HSTUSizes

SIZES = HSTUSizes(length=32, dim=64, heads=2, layers=2)
MOVIES = movietweetings.ROWS[1]  # 0: not in the vocabulary
UNKNOWN, DISLIKED, LIKED, EMPTY = range(4)  # what is known of a place's label; EMPTY: before the user's first rating

Batch = tuple[tuple[Tensor, Tensor], Tensor]


class Ranker(nn.Module):
    """Movies and labels, (B, length) int64 each, the candidate last, to logits (B, 1)."""

    def __init__(self, sizes: HSTUSizes) -> None:
        super().__init__()
        self.movie = nn.Embedding(MOVIES, sizes.dim)
        self.label = nn.Embedding(4, sizes.dim)
        self.hstu = HSTURanker(sizes)
        for table in (self.movie, self.label):
            nn.init.trunc_normal_(table.weight, std=0.02, a=-0.04, b=0.04)
        for layer in self.hstu.layers:
            nn.init.normal_(layer.uvqk.weight, std=0.02)
            nn.init.zeros_(layer.uvqk.bias)  # which the public block does not have
            nn.init.xavier_uniform_(layer.out.weight)

    def forward(self, movies: Tensor, labels: Tensor) -> Tensor:
        logits: Tensor = self.hstu(self.movie(movies) + self.label(labels))
        return logits


def build() -> Ranker:
    """The model; its weights are drawn from torch's generator."""
    return Ranker(SIZES)


def example_inputs(batch_size: int) -> tuple[Tensor, Tensor]:
    """Inputs of the model's forward, drawn at random."""
    shape = (batch_size, SIZES.length)
    return torch.randint(MOVIES, shape), torch.randint(4, shape)


def batches(batch_size: int, seed: int) -> Iterator[Batch]:
    """Batches of the past, in an order drawn from `seed`, without end."""
    movies, labels, targets, cut = _sequences()
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(cut, generator=generator).split(batch_size)[: cut // batch_size]:
            yield (movies[rows], labels[rows]), targets[rows]


def test_batches(batch_size: int, seed: int) -> Iterator[Batch]:
    """Batches of the future, in order of time."""
    movies, labels, targets, cut = _sequences()
    for rows in torch.arange(cut, len(targets)).split(batch_size):
        yield (movies[rows], labels[rows]), targets[rows]


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean binary cross-entropy of logits (B, 1) against labels (B,), in float32."""
    return nn.functional.binary_cross_entropy_with_logits(logits.float().squeeze(1), target)


@lru_cache(maxsize=1)
def _sequences() -> tuple[Tensor, Tensor, Tensor, int]:
    """Movies and labels (R, length), targets (R,) of all rows in order of time, and the first row of the future."""
    train, test = movietweetings.load(movietweetings.find_data())
    users, films = (torch.cat([train.ids[:, field], test.ids[:, field]]) for field in (0, 1))
    targets = torch.cat([train.label, test.label])
    past: defaultdict[int, list[int]] = defaultdict(list)
    rows = np.full((len(targets), SIZES.length), -1)  # -1: nothing there
    for row, user in enumerate(users.tolist()):
        seen = [*past[user][1 - SIZES.length :], row]
        rows[row, -len(seen) :] = seen
        if user:  # 0 is every user with a single rating of the past, or none
            past[user].append(row)
    places = torch.from_numpy(rows)
    movies = torch.where(places < 0, 0, films[places])
    labels = torch.where(places < 0, EMPTY, torch.where(targets[places] > 0, LIKED, DISLIKED))
    labels[:, -1] = UNKNOWN
    return movies, labels, targets, len(train)
