"""Student's t distribution, by the finite series for whole degrees of freedom."""

from __future__ import annotations

import math


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
    """P(|T| <= t) for `freedom` >= 1 degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
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
