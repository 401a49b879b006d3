"""Student's t intervals of a mean, and when looking at them again and again may decide."""

from __future__ import annotations

import math
from functools import lru_cache

from loka.errors import InputError
from loka.policy.cascade.settings import Budget
from loka.probe.profile.profile import CONFIDENCE, Estimate, Interval, Verdict

FIRST_LOOK = 4  # draws
EARLY_RISK = 0.02  # one-sided, shared by all looks before the last


def looks(limit: int) -> tuple[int, ...]:
    """After how many draws to look: 4, 8, 16, ... and at last `limit`. Raises InputError where limit is below 2."""
    if limit < 2:
        raise InputError(f"estimate: the limit of draws must be at least 2 for an interval, not {limit}")
    counts = []
    count = FIRST_LOOK
    while count < limit:
        counts.append(count)
        count *= 2
    return (*counts, limit)


def confidence(look: int, limit: int) -> float:
    """The two-sided confidence at which the look after `look` draws may stop the sampling.

    A verdict is wrong where a one-sided bound misses. The last look takes the stated 95 % (2.5 % one-sided);
    those before it share 2 % more, equally, so that by the union bound at most 4.5 % of estimates whose mean lies at
    the budget are decided wrongly.
    """
    planned = looks(limit)
    if look >= planned[-1] or len(planned) == 1:
        return CONFIDENCE
    return 1.0 - 2.0 * EARLY_RISK / (len(planned) - 1)


def interval(values: list[float], level: float = CONFIDENCE) -> Interval:
    """The mean of `values` and its t interval; one value has no spread, so its interval is unbounded.

    -inf in SQNR and inf in MERE (a result that is not finite) make the whole interval so: one such draw is
    enough. inf in SQNR (an exact product, as of zeros) is left out where other draws are finite.
    """
    if not values:
        raise InputError("interval: no values")
    if -math.inf in values:
        return Interval(-math.inf, -math.inf, -math.inf)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Interval(math.inf, math.inf, math.inf)
    mean = math.fsum(finite) / len(finite)
    if len(finite) == 1:
        return Interval(mean, -math.inf, math.inf)
    variance = math.fsum((value - mean) ** 2 for value in finite) / (len(finite) - 1)
    half = t_quantile((1 + level) / 2, len(finite) - 1) * math.sqrt(variance / len(finite))
    return Interval(mean, mean - half, mean + half)


def mere_interval(values: list[float], level: float = CONFIDENCE) -> Interval:
    """As `interval`, never below zero, and infinite where any draw is."""
    if math.inf in values:
        return Interval(math.inf, math.inf, math.inf)
    found = interval(values, level)
    return Interval(found.mean, max(found.low, 0.0), found.high)


def decided(estimate: Estimate, budget: Budget) -> bool:
    """Whether the estimate's intervals settle that it keeps the budget, or that it does not."""
    return estimate.verdict(budget) is not Verdict.UNDECIDED


@lru_cache(maxsize=256)
def t_quantile(level: float, degrees: int) -> float:
    """The quantile of Student's t with `degrees` (1 or more) degrees of freedom at `level`, from 0.5 to below 1."""
    low, high = 0.0, 1.0
    while _t_distribution(high, degrees) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if _t_distribution(middle, degrees) < level:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _t_distribution(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0, by the finite series for whole degrees (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2 == 1
    term = cosine if odd else 1.0
    total = 0.0 if degrees == 1 else term
    for i in range(3 if odd else 2, degrees - 1, 2):
        term *= cosine * cosine * (i - 1) / i
        total += term
    inside = (angle + sine * total) * 2 / math.pi if odd else sine * total
    return 0.5 + inside / 2
