"""Test for a loss of quality by FP8, with paired seeds, so that the noise between seeds cancels.

Two runs of one seed share initial weights, batches and their order; only the precision differs. Rounding to FP8 makes
training chaotic: a start that differs by 1e-6 ends elsewhere. So each seed may be trained in several draws of the
roundings (`loka.bench.quality.training.train_pair`), and its difference is their mean.

The test is sequential: two one-sided t tests over the seeds' differences, "parity" rejects that the mean is at or above
the budget, "lost" that it is at or below it. The data are looked at up to three times, at a quarter and a half of the
planned number of pairs and at the end. Each look may err by a part of the 5 %, and the parts add up to it: by the union
bound each wrong verdict has a probability of at most 5 %, whatever the looks have in common.

Of several heads each is tested by itself: "parity" is that of all heads, "lost" that of any, with its part of the 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from statistics import fmean, stdev, variance

from loka.bench.quality.heads import ONLY
from loka.bench.quality.training import PairResult
from loka.probe.estimate import t_quantile

CONFIDENCE = 0.95
BUDGET_PERCENT = 0.02  # of NE: what decides in this field
ERROR_RATE = 0.05  # of each wrong verdict, over all looks
_LOOKS = ((0.25, 0.05), (0.5, 0.15), (1.0, 0.80))  # share of the pairs, share of the error rate
_FEWEST = 4  # pairs at an early look: with fewer it could hardly decide
MOST_PAIRS = 100_000  # more are not counted: so near to the budget no number of pairs is practical


class QualityVerdict(StrEnum):
    """QualityVerdict on a mean difference against its budget."""

    PARITY = "parity"  # shown to be below the budget
    LOST = "lost"  # shown to be above the budget
    UNDECIDED = "undecided"  # neither: more pairs are needed


def looks(planned: int) -> tuple[tuple[int, float], ...]:
    """The looks at `planned` pairs: how many pairs each has, and its part of the error rate, which add up to 5 %.

    A look with too few pairs is left out, and its part goes to the last one.
    """
    early = [(math.ceil(share * planned), ERROR_RATE * part) for share, part in _LOOKS[:-1]]
    kept = [(pairs, part) for pairs, part in early if _FEWEST <= pairs < planned]
    return (*kept, (planned, ERROR_RATE - sum(part for _, part in kept)))


def judge(differences: Sequence[float], budget: float, planned: int, heads: int = 1) -> QualityVerdict:
    """The verdict of the first look that decides, of those that `differences` (in order) are enough for.

    They are of one of several `heads`: each may find a loss where there is none with its part of the error rate alone.
    """
    for pairs, error in looks(planned):
        if pairs > len(differences):
            break
        if bounds(differences[:pairs], error)[1] < budget:
            return QualityVerdict.PARITY
        if bounds(differences[:pairs], error / heads)[0] > budget:
            return QualityVerdict.LOST
    return QualityVerdict.UNDECIDED


def bounds(differences: Sequence[float], error: float) -> tuple[float, float]:
    """A lower and an upper bound of the mean, each wrong with probability `error`; infinite for fewer than two."""
    if len(differences) < 2:
        return -math.inf, math.inf
    half = t_quantile(1 - error, len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
    mean = fmean(differences)
    return mean - half, mean + half


def pairs_needed(differences: Sequence[float], budget: float, heads: int = 1) -> int | None:
    """How many pairs would decide (see `judge`), if their mean and spread stay as they are in `differences`.

    None if that cannot be told from fewer than two, or would be over MOST_PAIRS.
    """
    if len(differences) < 2:
        return None
    margin, spread = abs(budget - fmean(differences)), stdev(differences)
    shared_by = heads if fmean(differences) > budget else 1
    pairs = 2
    while pairs <= MOST_PAIRS:
        _, last = looks(pairs)[-1]
        half = t_quantile(1 - last / shared_by, pairs - 1) * spread / math.sqrt(pairs)
        if half < margin:
            return pairs
        # The quantile hardly changes with the number: go straight to where the bound would hold with this one.
        pairs = max(pairs + 1, math.ceil(pairs * min(4.0, (half / margin) ** 2))) if margin > 0 else MOST_PAIRS + 1
    return None


@dataclass(frozen=True, slots=True)
class Quality:
    """What the pairs say about one head, those of one seed side by side, all draws of it there.

    Differences are relative NE in percent, patched minus unpatched: positive is worse. `planned`: the number of seeds
    that the test was planned for; it may decide with fewer. `head`: its name; `heads`: how many are judged.
    """

    pairs: tuple[PairResult, ...]
    planned: int
    budget_percent: float = BUDGET_PERCENT
    head: str = ONLY
    heads: int = 1

    @property
    def seeds(self) -> tuple[tuple[PairResult, ...], ...]:
        """The pairs of each seed."""
        return tuple(tuple(pairs) for _, pairs in groupby(self.pairs, key=lambda pair: pair.seed))

    @property
    def differences(self) -> tuple[float, ...]:
        """Difference of each seed: the mean over its draws."""
        return tuple(fmean(pair.ne_difference_percent for pair in pairs) for pairs in self.seeds)

    @property
    def mean(self) -> float:
        """Mean difference over the seeds."""
        return fmean(self.differences)

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean; None for a single seed."""
        return stdev(self.differences) / math.sqrt(len(self.seeds)) if len(self.seeds) > 1 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean by Student's t; None for a single seed."""
        if self.standard_error is None:
            return None
        half = t_quantile((1 + CONFIDENCE) / 2, len(self.seeds) - 1) * self.standard_error
        return self.mean - half, self.mean + half

    @property
    def upper_bound(self) -> float | None:
        """What the mean is below with 95 %, by itself, without other looks; None for a single seed."""
        return bounds(self.differences, ERROR_RATE)[1] if len(self.seeds) > 1 else None

    @property
    def learned(self) -> bool:
        """True if the unpatched model predicts better than the share of positive labels: its mean NE is below 1."""
        return fmean(pair.as_is.ne for pair in self.pairs) < 1

    @property
    def verdict(self) -> QualityVerdict:
        """The verdict of `judge`."""
        return judge(self.differences, self.budget_percent, self.planned, self.heads)

    @property
    def seeds_needed(self) -> int | None:
        """See `pairs_needed`."""
        return pairs_needed(self.differences, self.budget_percent, self.heads)

    @property
    def draw_spread(self) -> tuple[float, float] | None:
        """How far draws of one seed lie apart: standard deviation of NE in percent, unpatched and patched.

        None without a seed of several draws.
        """
        several = [pairs for pairs in self.seeds if len(pairs) > 1]
        if not several:
            return None
        as_is = fmean(variance([100 * pair.as_is.ne / pairs[0].as_is.ne for pair in pairs]) for pairs in several)
        patched = fmean(variance([100 * pair.patched.ne / pairs[0].as_is.ne for pair in pairs]) for pairs in several)
        return math.sqrt(as_is), math.sqrt(patched)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the pairs say about each head that is judged, in the order of the policy."""

    pairs: tuple[PairResult, ...]
    heads: tuple[Quality, ...]

    @classmethod
    def of(cls, pairs: tuple[PairResult, ...], planned: int, budget_percent: float = BUDGET_PERCENT) -> Judgement:
        """That of `pairs`, which are at least one."""
        names = pairs[0].heads
        heads = (
            Quality(tuple(pair.of_head(name) for pair in pairs), planned, budget_percent, name, len(names))
            for name in names
        )
        return cls(pairs, tuple(heads))

    @property
    def worst(self) -> Quality:
        """The head that loses most."""
        return max(self.heads, key=lambda head: head.mean)

    @property
    def verdict(self) -> QualityVerdict:
        """Parity if each head keeps the budget, lost if any does not."""
        verdicts = {head.verdict for head in self.heads}
        for verdict in (QualityVerdict.LOST, QualityVerdict.UNDECIDED):
            if verdict in verdicts:
                return verdict
        return QualityVerdict.PARITY

    @property
    def seeds_needed(self) -> int | None:
        """How many seeds would decide, by one head that loses or by all that do not; None as in `pairs_needed`."""
        needed = [head.seeds_needed for head in self.heads]
        losing = [
            found
            for found, head in zip(needed, self.heads, strict=True)
            if found is not None and head.mean > head.budget_percent
        ]
        if losing:
            return min(losing)
        return None if None in needed else max(found for found in needed if found is not None)


def compare(
    pairs: Iterable[PairResult],
    planned: int,
    draws: int = 1,
    budget_percent: float = BUDGET_PERCENT,
    early: bool = True,
) -> Iterator[Judgement]:
    """Yield what is known after each seed, from its pairs in order, until the test decides or the pairs end.

    `pairs` has all draws of a seed one after the other. Without `early`, all are taken.
    """
    done: list[PairResult] = []
    for pair in pairs:
        done.append(pair)
        if len(done) % draws:
            continue
        judgement = Judgement.of(tuple(done), planned, budget_percent)
        yield judgement
        if early and judgement.verdict is not QualityVerdict.UNDECIDED:
            return
