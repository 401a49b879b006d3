"""A sequential test of whether a loss of quality stays under a budget.

Two one-sided t tests over independent differences, one from each seed: "parity" rejects that the mean is at or above
the budget, "lost" that it is at or below it. The data are looked at up to three times, at a quarter and a half of the
planned number of pairs and at the end. Each look may err by a part of the 5 %, and the parts add up to it: by the union
bound each wrong verdict has a probability of at most 5 %, whatever the looks have in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from statistics import fmean, stdev

from loka.probe.estimate import t_quantile

ERROR_RATE = 0.05  # of each wrong verdict, over all looks
_LOOKS = ((0.25, 0.05), (0.5, 0.15), (1.0, 0.80))  # share of the pairs, share of the error rate
_FEWEST = 4  # pairs at an early look: with fewer it could hardly decide
MOST_PAIRS = 100_000  # more are not counted: so near to the budget no number of pairs is practical


class Verdict(StrEnum):
    """Verdict on a mean difference against its budget."""

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


def judge(differences: Sequence[float], budget: float, planned: int) -> Verdict:
    """The verdict of the first look that decides, of those that `differences` (in order) are enough for."""
    for pairs, error in looks(planned):
        if pairs > len(differences):
            break
        low, high = bounds(differences[:pairs], error)
        if high < budget:
            return Verdict.PARITY
        if low > budget:
            return Verdict.LOST
    return Verdict.UNDECIDED


def bounds(differences: Sequence[float], error: float) -> tuple[float, float]:
    """A lower and an upper bound of the mean, each wrong with probability `error`; infinite for fewer than two."""
    if len(differences) < 2:
        return -math.inf, math.inf
    half = t_quantile(1 - error, len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
    mean = fmean(differences)
    return mean - half, mean + half


def pairs_needed(differences: Sequence[float], budget: float) -> int | None:
    """How many pairs would decide, if their mean and spread stay as they are in `differences`.

    None if that cannot be told from fewer than two, or would be over MOST_PAIRS.
    """
    if len(differences) < 2:
        return None
    margin, spread = abs(budget - fmean(differences)), stdev(differences)
    pairs = 2
    while pairs <= MOST_PAIRS:
        _, last = looks(pairs)[-1]
        half = t_quantile(1 - last, pairs - 1) * spread / math.sqrt(pairs)
        if half < margin:
            return pairs
        # The quantile hardly changes with the number: go straight to where the bound would hold with this one.
        pairs = max(pairs + 1, math.ceil(pairs * min(4.0, (half / margin) ** 2))) if margin > 0 else MOST_PAIRS + 1
    return None
