"""Predicted and actual error of a GEMM under a recipe, and statistics over many such rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from benchmarks.held_out.held_out_cases import StudyCase
from loka.numerics.enums import Format, Gemm, Scaling
from loka.probe.profile.profile import Interval

K = TypeVar("K")

EXACT_DB = 90.0  # above this SQNR quantization is exact up to float32 rounding: there is no error to predict
NORMAL, GAUSSIAN, COPULA = "N(0,1)", "gaussian", "copula"
TRAINING_ROWS = "training rows"  # not a sampler: the actual error on training rows
POOLED_ROWS = "pooled rows"  # not a sampler either: single real rows of the watched steps, combined at random
WHOLE_RUN = " (whole run)"  # suffix of a sampler's name: the profile covers all steps rather than the last
Z95 = 1.959963984540054

TARGET_DB = 0.3
TARGET_MERE_PERCENT = 5.0
TARGET_RATIO = 0.5


@dataclass(frozen=True, slots=True)
class HeldOutRow:
    """Errors of one GEMM of a site under one recipe for both operands. Actual: over the held-out batches."""

    model: str
    data: str
    site: str
    gemm: Gemm
    format: Format
    scaling: Scaling
    sampler: str
    predicted_mere: Interval
    predicted_sqnr: Interval  # dB
    actual_mere: Interval
    actual_sqnr: Interval  # dB

    @property
    def recipe(self) -> str:
        """`e4m3 rowwise`."""
        return f"{self.format.value} {self.scaling.value}"

    @property
    def gap_db(self) -> float:
        """Predicted minus actual SQNR, dB: positive is too optimistic."""
        return _difference(self.predicted_sqnr.mean, self.actual_sqnr.mean)

    @property
    def gap_mere_percent(self) -> float:
        """Predicted minus actual MERE, percent of the actual: negative is too optimistic."""
        actual = self.actual_mere.mean
        gap = _difference(self.predicted_mere.mean, actual)
        return 0.0 if gap == 0.0 else (100.0 * gap / actual if actual else math.inf)

    @property
    def exact(self) -> bool:
        """True if quantization loses nothing (one column, rowwise), so that there is no error to predict."""
        return self.actual_sqnr.mean > EXACT_DB


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """All rows of one case, and the time of its parts."""

    case: StudyCase
    rows: tuple[HeldOutRow, ...]
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Statistics of |gap| over the rows of one group."""

    count: int
    db_median: float
    db_p90: float
    mere_median: float  # percent
    mere_p90: float  # percent
    db_bias: float  # median of the signed gap, dB: positive is too optimistic


@dataclass(frozen=True, slots=True)
class Misses:
    """Comparison of another sampler with the Gaussian on rows whose actual value is outside the Gaussian's interval.

    `resolved` counts rows where the intervals of the actual value and the Gaussian do not overlap: there the held-out
    batches show that the Gaussian is wrong.
    """

    metric: str  # "SQNR" or "MERE"
    sampler: str
    count: int
    outside: int
    ratio_median: float  # |its gap| / |the Gaussian's gap|, over the rows outside; NaN if there are none
    halved: float  # share of the rows outside with a ratio of at most TARGET_RATIO; NaN if there are none
    resolved: int
    resolved_ratio_median: float
    resolved_halved: float

    @property
    def share(self) -> float:
        """Share of rows outside."""
        return self.outside / self.count if self.count else math.nan


def interval(values: Sequence[float]) -> Interval:
    """Mean and its 95 % interval by the normal approximation; of zero width for one value or a non-finite mean."""
    mean = statistics.fmean(values) if all(map(math.isfinite, values)) else min(values, key=lambda v: -abs(v))
    if len(values) < 2 or not math.isfinite(mean):
        return Interval(mean, mean, mean)
    half = Z95 * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def gaps(rows: Iterable[HeldOutRow]) -> Gaps:
    """Medians and 90th percentiles of |gap|, without rows where quantization is exact."""
    counted = [row for row in rows if not row.exact]
    if not counted:
        return Gaps(0, math.nan, math.nan, math.nan, math.nan, math.nan)
    db = [abs(row.gap_db) for row in counted]
    mere = [abs(row.gap_mere_percent) for row in counted]
    bias = statistics.median(row.gap_db for row in counted)
    return Gaps(len(counted), _at(db, 50), _at(db, 90), _at(mere, 50), _at(mere, 90), bias)


def misses(rows: Iterable[HeldOutRow], sampler: str, metric: str) -> Misses:
    """Compare `sampler` with the Gaussian on the rows that both have, without exact ones."""
    counted = [row for row in rows if not row.exact]
    theirs = {_key(row): row for row in counted if row.sampler == sampler}
    pairs = [(row, theirs[_key(row)]) for row in counted if row.sampler == GAUSSIAN and _key(row) in theirs]
    outside = [pair for pair in pairs if _outside(pair[0], metric)]
    resolved = [pair for pair in outside if _apart(pair[0], metric)]
    ratios, sure = [_ratio(*pair, metric) for pair in outside], [_ratio(*pair, metric) for pair in resolved]
    return Misses(
        metric=metric,
        sampler=sampler,
        count=len(pairs),
        outside=len(outside),
        ratio_median=_at(ratios, 50),
        halved=_share(ratios),
        resolved=len(resolved),
        resolved_ratio_median=_at(sure, 50),
        resolved_halved=_share(sure),
    )


def grouped(rows: Iterable[HeldOutRow], key: Callable[[HeldOutRow], K]) -> dict[K, list[HeldOutRow]]:
    """Rows grouped by `key`, in order of first occurrence."""
    groups: dict[K, list[HeldOutRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _key(row: HeldOutRow) -> tuple[str, ...]:
    return (row.model, row.data, row.site, row.gemm.value, row.format.value, row.scaling.value)


def _of(row: HeldOutRow, metric: str) -> tuple[Interval, Interval, float]:
    """Predicted, actual and |gap|."""
    if metric == "SQNR":
        return row.predicted_sqnr, row.actual_sqnr, abs(row.gap_db)
    return row.predicted_mere, row.actual_mere, abs(row.gap_mere_percent)


def _outside(row: HeldOutRow, metric: str) -> bool:
    predicted, actual, _ = _of(row, metric)
    return not predicted.low <= actual.mean <= predicted.high


def _apart(row: HeldOutRow, metric: str) -> bool:
    predicted, actual, _ = _of(row, metric)
    return predicted.high < actual.low or actual.high < predicted.low


def _ratio(gaussian: HeldOutRow, other: HeldOutRow, metric: str) -> float:
    above, below = _of(other, metric)[2], _of(gaussian, metric)[2]
    if math.isinf(above):
        return math.inf
    return above / below  # below is not zero: the actual value is outside the Gaussian's interval


def _share(ratios: Sequence[float]) -> float:
    return sum(ratio <= TARGET_RATIO for ratio in ratios) / len(ratios) if ratios else math.nan


def _at(values: Sequence[float], percent: float) -> float:
    """A percentile with linear interpolation; infinite values are the largest."""
    if not values:
        return math.nan
    finite = np.sort(np.minimum(np.asarray(values), np.finfo(np.float64).max))
    found = float(np.percentile(finite, percent))
    return math.inf if found > 1e300 else found


def _difference(a: float, b: float) -> float:
    return 0.0 if a == b else a - b
