"""Realistic click data without a file: each row is a function of seed, split and position.

Categorical ids follow Zipf's law, like users, items and campaigns; dense features are log-normal (counts, prices) or
Student-t with three degrees of freedom, without normalisation. Labels are drawn from a teacher, a factorisation
machine over all fields that is the same for every seed, calibrated so that about 30 % of the rows are clicks and the
teacher itself reaches an AUC of only about 0.8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from loka.errors import InputError

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Batch = tuple[tuple[Tensor, Tensor], Tensor]

ROWS = (4, 7, 12, 24, 31, 64, 100, 200, 400, 800, 1500, 3000, 6000, 10000, 20000)  # of each categorical field
EXPONENTS = np.linspace(0.8, 1.3, len(ROWS))  # of Zipf's law, for each field
LOG_NORMAL_SIGMAS = np.linspace(0.4, 1.2, 9)
STUDENT_T = 4  # fields with heavy tails on both sides
DENSE = len(LOG_NORMAL_SIGMAS) + STUDENT_T

BLOCK = 4096  # rows that share one random generator
TEACHER_KEY = 20240302
TEACHER_DIM = 4
FACTOR_STD = 0.25  # of the latent factors: interactions matter, but do not dominate the fields' own weights
SLOPE, INTERCEPT = 1.4, -1.09  # of the logit over the teacher's standardised score
SPLITS = {"train": 1, "test": 2, "calibration": 3}  # separate random streams


@dataclass(frozen=True, slots=True)
class ClickRows:
    """Consecutive rows: dense (R, DENSE), ids (R, len(ROWS)), click probability (R,) and click (R,)."""

    dense: npt.NDArray[np.float32]
    ids: Ids
    probability: Floats
    click: npt.NDArray[np.float32]


class Teacher:
    """The fixed interaction model that clicks are drawn from."""

    def __init__(self) -> None:
        rng = np.random.default_rng([TEACHER_KEY])
        self._cumulative = [_zipf(rows, exponent) for rows, exponent in zip(ROWS, EXPONENTS, strict=True)]
        self._weights = [rng.normal(size=rows) for rows in ROWS]
        self._factors = [rng.normal(size=(rows, TEACHER_DIM)) * FACTOR_STD for rows in ROWS]
        self._dense_weights = rng.normal(size=DENSE)
        self._dense_factors = rng.normal(size=(DENSE, TEACHER_DIM)) * FACTOR_STD
        _, _, score = self._draw(np.random.default_rng([TEACHER_KEY, SPLITS["calibration"]]), 4 * BLOCK)
        self._mean, self._std = float(score.mean()), float(score.std())

    def rows(self, split: str, seed: int, block: int) -> ClickRows:
        """One block of BLOCK rows."""
        rng = np.random.default_rng([TEACHER_KEY, SPLITS[split], seed, block])
        dense, ids, score = self._draw(rng, BLOCK)
        probability = 1 / (1 + np.exp(-(SLOPE * (score - self._mean) / self._std + INTERCEPT)))
        click = (rng.random(BLOCK) < probability).astype(np.float32)
        return ClickRows(dense.astype(np.float32), ids, probability, click)

    def _draw(self, rng: np.random.Generator, count: int) -> tuple[Floats, Ids, Floats]:
        """Dense features, ids, and the teacher's raw score of each row."""
        ids = np.stack([np.searchsorted(cumulative, rng.random(count)) for cumulative in self._cumulative], 1)
        normal = rng.normal(size=(count, len(LOG_NORMAL_SIGMAS)))
        student = rng.standard_t(3, size=(count, STUDENT_T))
        dense = np.concatenate([np.exp(normal * LOG_NORMAL_SIGMAS), student], 1)
        bounded = np.tanh(np.concatenate([normal, student], 1))
        return dense, ids, self._score(bounded, ids)

    def _score(self, dense: Floats, ids: Ids) -> Floats:
        """A factorisation machine: weights, and the products of all pairs through (sum^2 - sum of squares)."""
        linear = dense @ self._dense_weights
        total = dense @ self._dense_factors
        squares = dense**2 @ (self._dense_factors**2).sum(1)
        for column, (weights, factors) in enumerate(zip(self._weights, self._factors, strict=True)):
            chosen = factors[ids[:, column]]
            linear += weights[ids[:, column]]
            total += chosen
            squares += (chosen**2).sum(1)
        pairs: Floats = ((total**2).sum(1) - squares) / 2
        return linear + pairs


class ClickStream:
    """`samples` rows of one split as batches ((dense, ids), target); each iteration gives the same rows.

    dense is (B, DENSE) float32, ids (B, len(ROWS)) int64, target (B,) float32. Rows do not depend on the
    batch size; the last batch may be smaller. Raises InputError for a batch size below one or a negative seed.
    """

    def __init__(self, split: str, samples: int, batch_size: int, seed: int) -> None:
        if batch_size < 1 or seed < 0:
            raise InputError(
                f"click data: batch_size must be at least 1 and seed at least 0, not {batch_size} and {seed}"
            )
        self.split, self.samples, self.batch_size, self.seed = split, samples, batch_size, seed

    def __len__(self) -> int:
        return -(-self.samples // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        teacher = Teacher()
        held: dict[int, ClickRows] = {}
        for start in range(0, self.samples, self.batch_size):
            stop = min(start + self.batch_size, self.samples)
            needed = range(start // BLOCK, (stop - 1) // BLOCK + 1)
            held = {i: held[i] if i in held else teacher.rows(self.split, self.seed, i) for i in needed}
            first = needed[0] * BLOCK
            yield _cut(list(held.values()), start - first, stop - first)


def _cut(blocks: list[ClickRows], start: int, stop: int) -> Batch:
    """Rows `start` to `stop` of consecutive blocks, as tensors."""
    dense = np.concatenate([block.dense for block in blocks])[start:stop]
    ids = np.concatenate([block.ids for block in blocks])[start:stop]
    click = np.concatenate([block.click for block in blocks])[start:stop]
    return (torch.from_numpy(dense.copy()), torch.from_numpy(ids.copy())), torch.from_numpy(click.copy())


def example(batch_size: int) -> tuple[Tensor, Tensor]:
    """Inputs of a batch of real rows: dense (B, DENSE) and ids (B, len(ROWS))."""
    if batch_size == 0:
        return torch.empty(0, DENSE), torch.empty(0, len(ROWS), dtype=torch.int64)
    inputs, _ = next(iter(ClickStream("train", batch_size, batch_size, seed=0)))
    return inputs


def _zipf(rows: int, exponent: float) -> Floats:
    """Cumulative distribution of ids whose probability falls as (id + 1) ** -exponent."""
    mass = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    cumulative: Floats = np.cumsum(mass / mass.sum())
    cumulative[-1] = 1.0
    return cumulative


INITIAL_STD = 0.1  # of the embeddings; with unit variance, unseen ids would add too much noise


class FeatureEmbedding(nn.Module):
    """Dense features (B, dense), float, and categorical ids (B, tables), int64 -> embeddings (B, 1 + tables, dim).

    A small MLP turns the dense features into the first embedding; each categorical id is looked up in its own table of
    `rows[i]` rows.
    """

    def __init__(self, rows: tuple[int, ...], dense: int, dim: int) -> None:
        super().__init__()
        tables = [nn.Embedding(count, dim) for count in rows]
        for table in tables:
            nn.init.normal_(table.weight, std=INITIAL_STD)
        self.tables = nn.ModuleList(tables)
        self.dense = nn.Sequential(nn.Linear(dense, 2 * dim), nn.LayerNorm(2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        looked_up = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return torch.stack([self.dense(dense), *looked_up], 1)
