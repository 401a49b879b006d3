"""Test for a loss of quality by FP8, with paired seeds, so that the noise between seeds cancels.

Two runs of one seed share initial weights, batches and their order; only the precision differs. Student's t over the
seeds tests the mean of the relative difference in normalised entropy (NE).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev

from torch import nn

from loka.bench.quality.training import PairResult, train_pair
from loka.bench.quality.training_job import TrainingJob

CONFIDENCE = 0.95


class QualityVerdict(StrEnum):
    """Verdict on the patched model."""

    WITHIN_BUDGET = "within budget"  # the whole interval is at most the budget
    TOLD_APART = "told apart"  # worse: the whole interval is above zero, and it is not within budget
    UNDECIDED = "undecided"  # more seeds are needed


@dataclass(frozen=True, slots=True)
class Quality:
    """The result over all seeds.

    Differences are relative NE in percent, patched minus unpatched: positive is worse.
    """

    pairs: tuple[PairResult, ...]
    budget_percent: float

    @property
    def differences(self) -> tuple[float, ...]:
        """Difference of each seed."""
        return tuple(pair.ne_difference_percent for pair in self.pairs)

    @property
    def mean(self) -> float:
        """Mean difference over the seeds."""
        return fmean(self.differences)

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean; None for a single seed."""
        return stdev(self.differences) / math.sqrt(len(self.pairs)) if len(self.pairs) > 1 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean by Student's t; None for a single seed."""
        if self.standard_error is None:
            return None
        half = t_quantile(CONFIDENCE, len(self.pairs) - 1) * self.standard_error
        return self.mean - half, self.mean + half

    @property
    def verdict(self) -> QualityVerdict:
        """See QualityVerdict; a single seed is undecided."""
        if self.interval is None:
            return QualityVerdict.UNDECIDED
        low, high = self.interval
        if high <= self.budget_percent:
            return QualityVerdict.WITHIN_BUDGET
        return QualityVerdict.TOLD_APART if low > 0 else QualityVerdict.UNDECIDED


def compare(
    job: TrainingJob,
    patch: Callable[[nn.Module], object],
    seeds: Sequence[int],
    budget_percent: float = 0.05,
    progress: Callable[[int, str, int, int | None], None] | None = None,
    check: Callable[[object], None] | None = None,
    finished: Callable[[PairResult], None] | None = None,
) -> Quality:
    """Train a pair of models for each seed.

    `progress` is called with the seed, "as it is" or "patched", samples done and samples in all; `check` with what
    `patch` returned, after each patched run; `finished` with each seed's pair. Raises ValueError without seeds, and
    the errors of `train_pair`.
    """
    if not seeds:
        raise ValueError("compare needs at least one seed")
    pairs = []
    for seed in seeds:
        pair = train_pair(job, patch, seed, _for_seed(progress, seed), check)
        if finished is not None:
            finished(pair)
        pairs.append(pair)
    return Quality(tuple(pairs), budget_percent)


def t_quantile(confidence: float, freedom: int) -> float:
    """The t for which a Student-t variable of `freedom` degrees of freedom lies in [-t, t] with `confidence`."""
    low, high = 0.0, 1.0
    while t_within(high, freedom) < confidence:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, freedom) < confidence else (low, middle)
    return (low + high) / 2


def t_within(t: float, freedom: int) -> float:
    """P(|T| <= t), by the finite series for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2 == 1
    if freedom == 1:
        return 2 * angle / math.pi
    term = math.cos(angle) if odd else 1.0
    total = term
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= (k - 1) / k * math.cos(angle) ** 2
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def _for_seed(
    progress: Callable[[int, str, int, int | None], None] | None, seed: int
) -> Callable[[str, int, int | None], None] | None:
    if progress is None:
        return None
    return lambda label, done, total: progress(seed, label, done, total)
