"""Interpolation and extrapolation of measured times for one kind of part.

Measured parts are in nested tables: for each value on the first axis there is a table over the second, and so on.
Measurements are rarely a full grid, and each table is searched for its own neighbours, so that an isolated point does
no harm.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.kernels.measurements.measurement import Measurement
from loka.kernels.measurements.part_bounds import bound_us
from loka.kernels.measurements.parts import Part, PartKind

REACH = 4  # a neighbour's size is within this factor

Axes = tuple[int, ...]


def axes_of(part: Part) -> Axes:
    """Coordinates of a part: rows, columns and contraction of a GEMM; otherwise columns and rows."""
    if part.work is PartKind.GEMM:
        return (part.rows, part.columns, part.contraction)
    return (part.columns, part.rows)


class Near(NamedTuple):
    """Interpolated values at a point: time / bound, spread, and the least and largest time used."""

    share: float
    spread: float
    least: float  # microseconds
    most: float


@dataclass(frozen=True, slots=True)
class Point:
    """One measured part."""

    measurement: Measurement
    near: Near


@dataclass(slots=True)
class Table:
    """Measured parts by one axis. The entries are points on the last axis, and tables on the others."""

    values: list[int] = field(default_factory=list)
    logs: list[float] = field(default_factory=list)
    below: list[Table | Point] = field(default_factory=list)

    @classmethod
    def of(cls, measurements: Sequence[Measurement], device: DeviceSpec = DEFAULT) -> Table:
        """A table of measurements of one kind, at least one."""
        root = cls()
        for axes, index in sorted((axes_of(each.part), index) for index, each in enumerate(measurements)):
            each = measurements[index]
            table = root
            for value in axes[:-1]:
                table = table._child(value)
            share = each.us / bound_us(each.part, device)
            table._put(axes[-1], Point(each, Near(share, each.spread, each.us, each.us)))
        return root

    def _child(self, value: int) -> Table:
        if not self.values or self.values[-1] != value:
            self._put(value, Table())
        child = self.below[-1]
        if not isinstance(child, Table):
            raise TypeError("a table stands above points")
        return child

    def _put(self, value: int, below: Table | Point) -> None:
        self.values.append(value)
        self.logs.append(math.log(value))
        self.below.append(below)

    def between(self, axes: Axes) -> Near | None:
        """Interpolation between measured neighbours on every axis; None where an axis has no neighbour within REACH."""
        size = axes[0]
        index = bisect_left(self.values, size)
        if index < len(self.values) and self.values[index] == size:
            at = self._between(index, axes)
            if at is not None:
                return at
        low = self._first(range(index - 1, -1, -1), axes)
        high = self._first(range(index, len(self.values)), axes) if low is not None else None
        if low is None or high is None:
            return None
        return _mean(low[1], high[1], self._weight(low[0], high[0], size))

    def _between(self, index: int, axes: Axes) -> Near | None:
        below = self.below[index]
        return below.between(axes[1:]) if isinstance(below, Table) else below.near

    def _first(self, indices: range, axes: Axes) -> tuple[int, Near] | None:
        """The first of some values, from near to far, with neighbours on the other axes."""
        for index in indices:
            value = self.values[index]
            if value == axes[0]:
                continue
            if value * REACH < axes[0] or value > axes[0] * REACH:
                return None
            near = self._between(index, axes)
            if near is not None:
                return index, near
        return None

    def beside(self, axes: Axes) -> Near:
        """Value at the nearest point within the measured range, however far its neighbours are."""
        size = axes[0]
        index = bisect_left(self.values, size)
        if index == len(self.values):
            return self._beside(index - 1, axes)
        if index == 0 or self.values[index] == size:
            return self._beside(index, axes)
        low, high = self._beside(index - 1, axes), self._beside(index, axes)
        return _mean(low, high, self._weight(index - 1, index, size))

    def _beside(self, index: int, axes: Axes) -> Near:
        below = self.below[index]
        return below.beside(axes[1:]) if isinstance(below, Table) else below.near

    def _weight(self, low: int, high: int, size: int) -> float:
        """Position of a size between two values, 0 to 1, in logarithms."""
        return (math.log(size) - self.logs[low]) / (self.logs[high] - self.logs[low])

    def nearest(self, axes: Axes) -> tuple[float, Measurement]:
        """The nearest measured part, by distance in the logarithms of all axes, and the square of that distance.

        A size of 0, of a GEMM whose rows depend on the data, counts as 1.
        """
        found = self._nearest([math.log(max(size, 1)) for size in axes], math.inf)
        if found is None:
            raise ValueError("a table has at least one point")
        return found

    def _nearest(self, logs: Sequence[float], limit: float) -> tuple[float, Measurement] | None:
        """The nearest within a squared distance; among equally near ones the smallest on the first axis."""
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
        """Indices by distance from a value, the nearest first."""
        high = bisect_left(self.logs, log)
        low = high - 1
        while low >= 0 or high < len(self.logs):
            if high >= len(self.logs) or (low >= 0 and log - self.logs[low] <= self.logs[high] - log):
                yield low
                low -= 1
            else:
                yield high
                high += 1


def _mean(low: Near, high: Near, weight: float) -> Near:
    """Geometric mean of the shares; the larger spread."""
    share = low.share * (high.share / low.share) ** weight
    return Near(share, max(low.spread, high.spread), min(low.least, high.least), max(low.most, high.most))
