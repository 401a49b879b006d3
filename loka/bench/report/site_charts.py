"""Times and errors of a plan's sites as charts: bars of one scale, and rows of dots against the budgets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loka.bench.report.geometry import Axis, axis_of, percent
from loka.bench.report.model_tree import Precision, fused_sites, site_precision
from loka.kernels.measurements.parts import TimeSource
from loka.numerics.enums import Gemm
from loka.plan.format import format_mere, format_speedup, format_sqnr, format_us
from loka.plan.plan import Evidence, GemmPlan, Plan, SitePlan, StepTime
from loka.plan.view.table import budget_of, interaction_groups, name_of_group, owner_of_group, site_groups
from loka.policy.settings import Budget

MOST_BARS = 24  # the others are summed up
MOST_ROWS = 60  # of dots
_LEAST_CERTAIN = (TimeSource.MEASURED, TimeSource.INTERPOLATED, TimeSource.ESTIMATED)
_MARGIN = 1.08  # of the axis beyond what is on it
_MOST_DB = 80.0  # an SQNR beyond it, of an operand that is exact, is at the end of the axis


@dataclass(frozen=True, slots=True)
class TimeBar:
    """The time of a site in a training step, or of several alike ones together, planned and in BF16."""

    name: str
    note: str  # "3 alike", "a mixing layer of 16 embeddings"; "" for one site
    precision: Precision
    us: float
    as_is_us: float
    source: TimeSource  # of the least certain

    @property
    def speedup(self) -> float:
        """Speedup over BF16."""
        return self.as_is_us / self.us if self.us else 1.0

    @property
    def words(self) -> str:
        """The row as a sentence: `layers.*.fmb.0: 122 us planned, 95.1 us in BF16, 0.78x, measured`."""
        return (
            f"{self.name}: {format_us(self.us)} planned, {format_us(self.as_is_us)} in BF16, "
            f"{format_speedup(self.speedup)}, {self.source.value}"
        )


@dataclass(frozen=True, slots=True)
class TimeChart:
    """The bars, the slowest in BF16 first, and their scale."""

    bars: tuple[TimeBar, ...]
    longest: float  # microseconds of the full width
    untimed: int  # sites without a time that no interaction contains

    def width(self, us: float) -> float:
        """The length of a time in per cent of the width."""
        return percent(us / self.longest) if self.longest else 0.0


def time_chart(plan: Plan, shown: int = MOST_BARS) -> TimeChart | None:
    """The chart of a plan; None where no measurement decided any site."""
    fused, bars = fused_sites(plan), []
    for group in site_groups(plan):
        site, timing = group[0].site, group[0].timing
        if timing is not None and site.calls:
            precision = site_precision(group[0], site.name in fused)
            bars.append(_bar(name_of_group(group), "", precision, timing.chosen, timing.as_is, site.calls, len(group)))
    for alike in interaction_groups(plan):
        first = alike[0]
        if first.chosen is not None and first.as_is is not None:
            name, times = owner_of_group(alike), (first.chosen, first.as_is)
            bars.append(_bar(name, first.what, Precision.FUSED, *times, first.calls, len(alike)))
    if not bars:
        return None
    bars.sort(key=lambda bar: (-max(bar.as_is_us, bar.us), bar.name))
    if len(bars) > shown:
        bars = [*bars[: shown - 1], _summed(bars[shown - 1 :])]
    inside = {name for each in plan.interactions for name in each.takes}
    untimed = sum(each.timing is None and each.site.name not in inside for each in plan.sites)
    return TimeChart(tuple(bars), max(max(bar.us, bar.as_is_us) for bar in bars), untimed)


def _bar(
    name: str, what: str, precision: Precision, chosen: StepTime, as_is: StepTime, calls: int, count: int
) -> TimeBar:
    """The bar of `count` alike ones together."""
    note = ", ".join([*([what] if what else []), *([f"{count} alike"] if count > 1 else [])])
    return TimeBar(name, note, precision, chosen.us * calls * count, as_is.us * calls * count, chosen.source)


def _summed(bars: Sequence[TimeBar]) -> TimeBar:
    """The bar of all that are not shown one by one."""
    precisions = [bar.precision for bar in bars]
    return TimeBar(
        name=f"{len(bars)} smaller ones",
        note="together",
        precision=max(dict.fromkeys(precisions), key=precisions.count),
        us=sum(bar.us for bar in bars),
        as_is_us=sum(bar.as_is_us for bar in bars),
        source=max((bar.source for bar in bars), key=_LEAST_CERTAIN.index),
    )


@dataclass(frozen=True, slots=True)
class DotRow:
    """A site, or several alike ones, with the worst of each GEMM. Of one not in FP8, it is the error of FP8."""

    name: str
    count: int
    budget: Budget
    dots: tuple[tuple[GemmPlan, Evidence], ...]

    @property
    def words(self) -> str:
        """The row as a sentence."""
        dots = "; ".join(
            f"{gemm.gemm.value}{'' if gemm.fp8 else ' (not in FP8)'}: MERE {format_mere(each.mere)}, "
            f"SQNR {format_sqnr(each.sqnr_db)} dB, {each.verdict.value}"
            for gemm, each in self.dots
        )
        return f"{self.name}, budget MERE {self.budget.mere:g} and SQNR {self.budget.sqnr_db:g} dB: {dots}"

    @property
    def used(self) -> float:
        """The share of the budget that the worst GEMM in FP8 uses; -1 where none is in FP8."""
        budget = self.budget.mere
        shares = [each.mere.high / budget if budget else math.inf for gemm, each in self.dots if gemm.fp8]
        return max(shares, default=-1.0)


@dataclass(frozen=True, slots=True)
class DotChart:
    """The rows, the nearest to its budget first, and the axes that they share."""

    mere: Axis
    sqnr: Axis
    rows: tuple[DotRow, ...]
    left_out: int  # rows further from their budget

    @property
    def budget(self) -> Budget | None:
        """The budget of all rows; None if they have several."""
        found = {(row.budget.mere, row.budget.sqnr_db) for row in self.rows}
        return self.rows[0].budget if len(found) == 1 else None


def dot_chart(plan: Plan, shown: int = MOST_ROWS) -> DotChart | None:
    """The chart of a plan; None where no GEMM has evidence."""
    groups = site_groups(plan)
    rows = [DotRow(name_of_group(each), len(each), budget_of(each[0].history), _worst(each)) for each in groups]
    found = sorted((row for row in rows if row.dots), key=lambda row: -row.used)
    if not found:
        return None
    kept = found[:shown]
    evidence = [each for row in kept for _, each in row.dots]
    meres = [end for each in evidence for end in (each.mere.low, each.mere.mean, each.mere.high)]
    decibels = [end for each in evidence for end in (each.sqnr_db.low, each.sqnr_db.mean, each.sqnr_db.high)]
    meres = list(filter(math.isfinite, [*meres, *(row.budget.mere for row in kept)]))
    decibels = list(filter(math.isfinite, [*decibels, *(row.budget.sqnr_db for row in kept)]))
    mere = axis_of(0.0, _MARGIN * max(meres))
    sqnr = axis_of(math.floor(min(decibels)) - 1.0, math.ceil(min(max(decibels), _MOST_DB)) + 1.0)
    return DotChart(mere, sqnr, tuple(kept), len(found) - len(kept))


def _worst(group: Sequence[SitePlan]) -> tuple[tuple[GemmPlan, Evidence], ...]:
    """Of each GEMM the one with the largest error."""
    found: dict[Gemm, tuple[GemmPlan, Evidence]] = {}
    for gemm in (gemm for site in group for gemm in site.gemms):
        known = found.get(gemm.gemm)
        if gemm.evidence is not None and (known is None or known[1].mere.high < gemm.evidence.mere.high):
            found[gemm.gemm] = (gemm, gemm.evidence)
    return tuple(found.values())
