"""Histogram of magnitudes: one column per octave, heights by the logarithm of the count; as text and as numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loka.numerics.enums import Operand
from loka.probe.stats.site_stats import LOWEST, PER_OCTAVE

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = ".:-=+*#@"  # for a terminal without block characters
_PER_LABEL = 8  # octaves between labels of the axis


@dataclass(frozen=True, slots=True)
class Octaves:
    """Counts of |x| by octave: `counts[i]` are of [2^(first + i), 2^(first + i + 1)). Both ends are multiples of 8."""

    first: int
    counts: tuple[int, ...]

    @property
    def labels(self) -> range:
        """The exponents that an axis is labelled with, both ends among them."""
        return range(self.first, self.first + len(self.counts) + 1, _PER_LABEL)

    @property
    def heights(self) -> tuple[float, ...]:
        """The logarithm of each count relative to the largest, 0 to 1; 0 for an empty octave."""
        top = math.log1p(max(self.counts))
        return tuple(math.log1p(count) / top for count in self.counts)


def octaves_of(operand: Operand, magnitudes: Sequence[int]) -> Octaves | None:
    """Octaves from counts of |x| in half octaves (`bins`); None for an operand without non-zero values."""
    octaves = {
        LOWEST[operand] + start // PER_OCTAVE: count
        for start in range(0, len(magnitudes), PER_OCTAVE)
        if (count := sum(magnitudes[start : start + PER_OCTAVE]))
    }
    if not octaves:
        return None
    first = min(octaves) // _PER_LABEL * _PER_LABEL
    last = (max(octaves) // _PER_LABEL + 1) * _PER_LABEL
    return Octaves(first, tuple(octaves.get(exponent, 0) for exponent in range(first, last)))


def histogram(operand: Operand, magnitudes: Sequence[int], levels: str = BLOCKS) -> tuple[str, str]:
    """The bars and the axis below them; two empty strings for an operand without non-zero values.

    `magnitudes` are counts of |x| in half octaves (`bins`). Both ends are shown at whole labels. `levels`
    are the characters of the bars, lowest first; an octave without a value is a space.
    """
    found = octaves_of(operand, magnitudes)
    if found is None:
        return "", ""
    most = len(levels) - 1
    bars = "".join(levels[min(int(each * len(levels)), most)] if each else " " for each in found.heights)
    axis = "".join(f"2^{exponent}".ljust(_PER_LABEL) for exponent in found.labels)
    return bars.rstrip(), axis.rstrip()
