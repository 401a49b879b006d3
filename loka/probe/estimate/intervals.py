"""Student's t intervals of a mean, and when repeated looks at them may decide."""

from __future__ import annotations

import math
from functools import lru_cache

from loka.errors import InputError
from loka.policy.settings import Budget
from loka.probe.profile.profile import CONFIDENCE, Estimate, Interval, Verdict

FIRST_LOOK = 4  # draws
EARLY_RISK = 0.02  # one-sided, shared by all looks before the last


def looks(limit: int) -> tuple[int, ...]:
    """Numbers of draws at which to look: 4, 8, 16, ... and finally `limit`. Raises InputError if limit is below 2."""
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

    A verdict is wrong if a one-sided bound misses. The last look has the stated 95 % (2.5 % one-sided); the earlier
    ones share another 2 % equally, so that by the union bound at most 4.5 % of estimates with a mean at the budget are
    decided wrongly.
    """
    planned = looks(limit)
    if look >= planned[-1] or len(planned) == 1:
        return CONFIDENCE
    return 1.0 - 2.0 * EARLY_RISK / (len(planned) - 1)


def interval(values: list[float], level: float = CONFIDENCE) -> Interval:
    """The mean of `values` and its t interval; one value has no spread, so its interval is unbounded.

    -inf in SQNR and inf in MERE (a non-finite result) make the whole interval infinite: one such draw is enough. inf in
    SQNR (an exact product, such as of zeros) is ignored if other draws are finite.
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
    """As `interval`, never below zero, and infinite if any draw is."""
    if math.inf in values:
        return Interval(math.inf, math.inf, math.inf)
    found = interval(values, level)
    return Interval(found.mean, max(found.low, 0.0), found.high)


def decided(estimate: Estimate, budget: Budget) -> bool:
    """True if the estimate's intervals settle that it keeps the budget, or that it does not."""
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
    """P(T <= t) for t >= 0, by the finite series for integer degrees (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
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
