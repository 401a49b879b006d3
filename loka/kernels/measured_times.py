"""Times between, beside and beyond measured ones of one kind of part: the arithmetic behind `measurements`.

Measured parts stand in nested tables: for each value on the first axis a table over the second, and so on. What was
measured is rarely a full grid, and each table is asked for its own neighbours, so that a point that was measured alone
spoils nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from loka.kernels.measurement_rows import Measurement
from loka.kernels.part_bounds import bound_us
from loka.kernels.parts import Part, Work

REACH = 4  # a neighbour has at least a quarter, and at most four times, of the size in question
ALIGNMENT = 16  # elements: kernels for sizes that are no multiples of it are others, or pad

Axes = tuple[int, ...]
Time = tuple[float, float]  # microseconds, or a share of a bound; and spread


def axes_of(part: Part) -> Axes:
    """Where a part stands: rows, columns, contraction of a GEMM; else columns and rows."""
    if part.work is Work.GEMM:
        return (part.rows, part.columns, part.contraction)
    return (part.columns, part.rows)


def is_aligned(part: Part) -> bool:
    """Whether the sizes that lie along memory are multiples of ALIGNMENT."""
    return part.columns % ALIGNMENT == 0 and part.contraction % ALIGNMENT == 0


@dataclass(frozen=True, slots=True)
class Point:
    """One measured part."""

    measurement: Measurement
    share: float  # of its time and its bound


@dataclass(slots=True)
class Table:
    """Measured parts by one axis. Below the last axis stand points, above it tables."""

    linear: bool  # whether times are interpolated linearly in sizes, that is in bytes, and not in the logarithms
    values: list[int] = field(default_factory=list)
    logs: list[float] = field(default_factory=list)
    below: list[Table | Point] = field(default_factory=list)

    @classmethod
    def of(cls, measurements: Sequence[Measurement]) -> Table:
        """A table of measurements of one kind; there is at least one."""
        points = sorted((axes_of(each.part), index) for index, each in enumerate(measurements))
        linear = measurements[0].part.work is not Work.GEMM
        root = cls(linear)
        for axes, index in points:
            each = measurements[index]
            table = root
            for value in axes[:-1]:
                table = table._child(value)
            table._put(axes[-1], Point(each, each.us / bound_us(each.part)))
        return root

    def _child(self, value: int) -> Table:
        if not self.values or self.values[-1] != value:
            self._put(value, Table(self.linear))
        child = self.below[-1]
        if not isinstance(child, Table):
            raise TypeError("a table stands above points")
        return child

    def _put(self, value: int, below: Table | Point) -> None:
        self.values.append(value)
        self.logs.append(math.log(value))
        self.below.append(below)

    def inside(self, axes: Axes) -> Time | None:
        """Microseconds between measured neighbours on every axis, None where some axis has none within REACH."""
        size = axes[0]
        index = bisect_left(self.values, size)
        if index < len(self.values) and self.values[index] == size:
            at = self._inside(index, axes)
            if at is not None:
                return at
        low = self._first(range(index - 1, -1, -1), axes)
        high = self._first(range(index, len(self.values)), axes) if low is not None else None
        if low is None or high is None:
            return None
        first, second = low[0], high[0]
        if self.linear:
            weight = (size - self.values[first]) / (self.values[second] - self.values[first])
            return _mean(low[1], high[1], weight)
        weight = (math.log(size) - self.logs[first]) / (self.logs[second] - self.logs[first])
        return _geometric(low[1], high[1], weight)

    def _inside(self, index: int, axes: Axes) -> Time | None:
        below = self.below[index]
        if isinstance(below, Table):
            return below.inside(axes[1:])
        return below.measurement.us, below.measurement.spread

    def _first(self, indices: range, axes: Axes) -> tuple[int, Time] | None:
        """The first of some values, from near to far, that has a time at the other axes."""
        for index in indices:
            value = self.values[index]
            if value == axes[0]:
                continue
            if value * REACH < axes[0] or value > axes[0] * REACH:
                return None
            time = self._inside(index, axes)
            if time is not None:
                return index, time
        return None

    def share(self, axes: Axes) -> Time:
        """The share of time and bound at the nearest place that was measured, between neighbours where there are."""
        size = axes[0]
        index = bisect_left(self.values, size)
        if index == len(self.values):
            return self._share(index - 1, axes)
        if index == 0 or self.values[index] == size:
            return self._share(index, axes)
        weight = (math.log(size) - self.logs[index - 1]) / (self.logs[index] - self.logs[index - 1])
        return _geometric(self._share(index - 1, axes), self._share(index, axes), weight)

    def _share(self, index: int, axes: Axes) -> Time:
        below = self.below[index]
        if isinstance(below, Table):
            return below.share(axes[1:])
        return below.share, below.measurement.spread

    def nearest(self, axes: Axes) -> tuple[float, Measurement]:
        """The measured part at the least distance in the logarithms of all axes, with the square of that distance."""
        found = self._nearest([math.log(size) for size in axes], math.inf)
        if found is None:
            raise ValueError("a table has at least one point")
        return found

    def _nearest(self, logs: Sequence[float], limit: float) -> tuple[float, Measurement] | None:
        """The nearest at a distance under a limit; of equally near ones the smallest by the first axis."""
        best: tuple[float, Measurement] | None = None
        for index in self._outwards(logs[0]):
            apart = (self.logs[index] - logs[0]) ** 2
            if apart >= limit:
                break
            below = self.below[index]
            if isinstance(below, Point):
                best, limit = (apart, below.measurement), apart
            else:
                found = below._nearest(logs[1:], limit - apart)
                if found is not None:
                    best, limit = (apart + found[0], found[1]), apart + found[0]
        return best

    def _outwards(self, log: float) -> Iterator[int]:
        """Indices by the distance of their values from one, the nearest first."""
        high = bisect_left(self.logs, log)
        low = high - 1
        while low >= 0 or high < len(self.logs):
            if high >= len(self.logs) or (low >= 0 and log - self.logs[low] <= self.logs[high] - log):
                yield low
                low -= 1
            else:
                yield high
                high += 1


def _mean(low: Time, high: Time, weight: float) -> Time:
    us = low[0] + (high[0] - low[0]) * weight
    return _held(us, low, high)


def _geometric(low: Time, high: Time, weight: float) -> Time:
    return _held(low[0] * (high[0] / low[0]) ** weight, low, high)


def _held(us: float, low: Time, high: Time) -> Time:
    """Between both times, whatever rounding did; with the larger spread."""
    least, most = (low[0], high[0]) if low[0] <= high[0] else (high[0], low[0])
    return min(max(us, least), most), max(low[1], high[1])
