"""Geometry of charts: positions on an axis as percentages, round ticks, and paths in a box of 100 by 100.

Charts are as wide as the page lets them be, without a script: what is across is in per cent of the width, text and
line widths are in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

BOX = 100.0  # side of the box that paths are drawn in
_ROUND = (1, 2, 2.5, 5, 10)  # steps between ticks, times a power of ten


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis from `low` to `high`, `low < high`, with its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """The position of a value in per cent, 0 to 100; beyond an end, that end. NaN is at the low end."""
        if math.isnan(value):
            return 0.0
        return percent(min(max((value - self.low) / (self.high - self.low), 0.0), 1.0))


def percent(share: float) -> float:
    """A share as a percentage with two decimals, for attributes."""
    return round(BOX * share, 2) + 0.0  # no -0.0


def axis_of(low: float, high: float, ticks: int = 5) -> Axis:
    """An axis that holds `low` and `high`, which are finite, with up to about `ticks` round ticks inside.

    The ends stay where they are; an axis without a width is widened.
    """
    if not low < high:
        margin = abs(low) / 2 or 1.0
        low, high = low - margin, high + margin
    step = _step((high - low) / max(ticks - 1, 1))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis(low, high, tuple(number * step + 0.0 for number in range(first, last + 1)))


def _step(least: float) -> float:
    """The smallest round step that is at least so large."""
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(each * power for each in _ROUND if each * power >= least * (1 - 1e-9))


def label(value: float, ticks: Sequence[float]) -> str:
    """The text of a tick, with the decimals that tell it from its neighbours."""
    step = min((abs(b - a) for a, b in pairwise(ticks)), default=abs(value) or 1.0)
    decimals = next((count for count in range(8) if abs(round(step, count) - step) < 1e-9 * step), 8)
    return f"{value:.{decimals}f}"


def line(points: Sequence[tuple[float, float]]) -> str:
    """The path through points of the box; "" for none."""
    return "M" + " L".join(f"{x:.2f},{y:.2f}" for x, y in points) if points else ""


def band(upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]]) -> str:
    """The closed path between two lines of the box, both from left to right; "" for none."""
    return f"{line([*upper, *reversed(lower)])} Z" if upper else ""
