"""Histogram of magnitudes as text: one column per octave, heights by the logarithm of the count."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loka.numerics.enums import Operand
from loka.probe.stats.bins import LOWEST, PER_OCTAVE

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = ".:-=+*#@"  # for a terminal without block characters
_COUNTER_ID = 8  # octaves between labels of the axis


def histogram(operand: Operand, magnitudes: Sequence[int], levels: str = BLOCKS) -> tuple[str, str]:
    """The bars and the axis below them; two empty strings for an operand without non-zero values.

    `magnitudes` are counts of |x| in half octaves (`bins`). Both ends are shown at whole labels. `levels`
    are the characters of the bars, lowest first; an octave without a value is a space.
    """
    octaves = [sum(magnitudes[start : start + PER_OCTAVE]) for start in range(0, len(magnitudes), PER_OCTAVE)]
    filled = [LOWEST[operand] + index for index, count in enumerate(octaves) if count]
    if not filled:
        return "", ""
    first = filled[0] // _COUNTER_ID * _COUNTER_ID
    last = (filled[-1] // _COUNTER_ID + 1) * _COUNTER_ID
    counts = [_at(octaves, exponent - LOWEST[operand]) for exponent in range(first, last)]
    top = math.log1p(max(counts))
    bars = "".join(_bar(math.log1p(count) / top, levels) if count else " " for count in counts)
    axis = "".join(f"2^{exponent}".ljust(_COUNTER_ID) for exponent in range(first, last + 1, _COUNTER_ID))
    return bars.rstrip(), axis.rstrip()


def _at(octaves: Sequence[int], index: int) -> int:
    return octaves[index] if 0 <= index < len(octaves) else 0


def _bar(height: float, levels: str) -> str:
    """The character for a height in (0, 1]."""
    return levels[min(int(height * len(levels)), len(levels) - 1)]
