"""A plan's sites as charts: times as bars, errors as dots against the budgets, and the distributions of operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from loka.bench.report.geometry import Axis, axis_of
from loka.bench.report.model_tree import Precision, fused_sites, site_precision
from loka.kernels.measurements.parts import TimeSource
from loka.numerics.enums import Gemm
from loka.plan.evidence import ProfiledSites
from loka.plan.format import format_mere, format_share, format_speedup, format_sqnr, format_us
from loka.plan.plan import Evidence, GemmPlan, Plan, SitePlan, SiteTiming
from loka.plan.view.histogram import octaves_of
from loka.plan.view.table import budget_of, interaction_groups, name_of_group, owner_of_group, rule_names, site_groups
from loka.policy.settings import Budget
from loka.probe.profile.profile import OperandSummary, Quantiles

MOST_BARS = 24  # the others are summed up
MOST_ROWS = 60  # of dots
MOST_DISTRIBUTIONS = 40  # those of the sites with most FLOPs
_LEAST_CERTAIN = tuple(TimeSource)
_MARGIN = 1.08  # of the axis beyond what is on it
_MOST_DB = 80.0  # an SQNR beyond it, of an operand that is exact, is at the end of the axis


@dataclass(frozen=True, slots=True)
class TimeBar:
    """The time of a site in a training step, or of several alike ones together, planned, without FP8 and in BF16."""

    name: str
    note: str  # "3 alike", "a mixing layer of 16 embeddings"; "" for one site
    precision: Precision
    us: float
    without_fp8_us: float
    as_is_us: float
    source: TimeSource  # of the least certain
    slowed: bool = False  # by FP8

    @property
    def speedup(self) -> float:
        """Speedup over BF16."""
        return self.as_is_us / self.us if self.us else 1.0

    @property
    def words(self) -> str:
        """The row as a sentence: `fmb.0: 122 us planned, 95.1 us without FP8, 110 us in compiled BF16, 0.90x, ...`."""
        slowed = ", which FP8 slows" if self.slowed else ""
        return (
            f"{self.name}: {format_us(self.us)} planned, {format_us(self.without_fp8_us)} without FP8, "
            f"{format_us(self.as_is_us)} in compiled BF16, {format_speedup(self.speedup)}{slowed}, {self.source.value}"
        )


@dataclass(frozen=True, slots=True)
class TimeChart:
    """The bars, the slowest in BF16 first, and their scale."""

    bars: tuple[TimeBar, ...]
    longest: float  # microseconds of the full width
    untimed: int  # sites without a time that no interaction contains


def time_chart(plan: Plan, shown: int = MOST_BARS) -> TimeChart | None:
    """The chart of a plan; None where no measurement decided any site."""
    fused, names, bars = fused_sites(plan), rule_names(plan), []
    for group in site_groups(plan):
        site, timing = group[0].site, group[0].timing
        if timing is not None and site.calls:
            precision, name = site_precision(group[0], site.name in fused), name_of_group(group, names)
            bar = _bar(name, "", precision, timing, site.calls, len(group))
            bars.append(replace(bar, slowed=group[0].slowed_by_fp8))
    for alike in interaction_groups(plan):
        first = alike[0]
        if first.chosen is not None and first.as_is is not None:
            timing = SiteTiming(first.chosen, first.chosen, first.as_is)
            bars.append(_bar(owner_of_group(alike), first.what, Precision.FUSED, timing, first.calls, len(alike)))
    if not bars:
        return None
    bars.sort(key=lambda bar: (-max(bar.as_is_us, bar.us), bar.name))
    if len(bars) > shown:
        bars = [*bars[: shown - 1], _summed(bars[shown - 1 :])]
    inside = {name for each in plan.interactions for name in each.sites}
    untimed = sum(each.timing is None and each.site.name not in inside for each in plan.sites)
    return TimeChart(tuple(bars), max(max(bar.us, bar.without_fp8_us, bar.as_is_us) for bar in bars) or 1.0, untimed)


def _bar(name: str, what: str, precision: Precision, timing: SiteTiming, calls: int, count: int) -> TimeBar:
    """The bar of `count` alike ones together."""
    note = ", ".join([*([what] if what else []), *([f"{count} alike"] if count > 1 else [])])
    us, without_fp8_us, as_is_us = (
        each.us * calls * count for each in (timing.chosen, timing.without_fp8, timing.as_is)
    )
    return TimeBar(name, note, precision, us, without_fp8_us, as_is_us, timing.chosen.source)


def _summed(bars: Sequence[TimeBar]) -> TimeBar:
    """The bar of all that are not shown one by one."""
    precisions = [bar.precision for bar in bars]
    return TimeBar(
        name=f"{len(bars)} smaller ones",
        note="together",
        precision=max(dict.fromkeys(precisions), key=precisions.count),
        us=sum(bar.us for bar in bars),
        without_fp8_us=sum(bar.without_fp8_us for bar in bars),
        as_is_us=sum(bar.as_is_us for bar in bars),
        source=max((bar.source for bar in bars), key=_LEAST_CERTAIN.index),
        slowed=any(bar.slowed for bar in bars),
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
    groups, names = site_groups(plan), rule_names(plan)
    rows = [DotRow(name_of_group(each, names), len(each), budget_of(each[0].history), _worst(each)) for each in groups]
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


@dataclass(frozen=True, slots=True)
class OperandChart:
    """One operand of a site, an octave a column. Heights are logarithms of counts."""

    operand: str  # "input"
    heights: tuple[float, ...]  # of the octaves, 0 to 1
    axis: Axis | None  # of exponents of 2; None for an operand of zeros
    markers: tuple[tuple[str, float], ...]  # ("amax", in per cent of the axis)
    facts: tuple[tuple[str, str], ...]  # ("amax", "12.4, usually 8.1"), ...
    losses: tuple[tuple[str, str, str, str], ...]  # scale, format, underflow, subnormal

    @property
    def words(self) -> str:
        """The chart as a sentence."""
        span = f", from 2^{self.axis.low:g} to 2^{self.axis.high:g}" if self.axis is not None else ", only zeros"
        return f"Magnitudes of the {self.operand.replace('_', ' ')}{span}"


@dataclass(frozen=True, slots=True)
class SiteDistributions:
    """A site of the profile with its operands, those that were seen, by name."""

    name: str
    share: float  # of the model's forward FLOPs
    operands: dict[str, OperandChart]


@dataclass(frozen=True, slots=True)
class Distributions:
    """The sites with most FLOPs, in model order."""

    sites: tuple[SiteDistributions, ...]
    left_out: int
    opened: str  # the site with most FLOPs


def distributions(plan: Plan, known: ProfiledSites, shown: int = MOST_DISTRIBUTIONS) -> Distributions:
    """The distributions of a plan's sites that the profile recorded."""
    seen = [
        (site.site.name, site.site.share, found.operands)
        for site in plan.sites
        if (found := known.sites.get(site.site.name)) is not None and found.operands
    ]
    largest = [name for name, _, _ in sorted(seen, key=lambda each: -each[1])[:shown]]
    sites = tuple(
        SiteDistributions(name, share, {chart.operand: chart for chart in map(_chart, operands)})
        for name, share, operands in seen
        if name in largest
    )
    return Distributions(sites, len(seen) - len(sites), largest[0] if largest else "")


def _chart(operand: OperandSummary) -> OperandChart:
    octaves = octaves_of(operand.operand, operand.magnitudes)
    axis: Axis | None = None
    if octaves is not None:
        axis = Axis(octaves.first, octaves.first + len(octaves.counts), tuple(octaves.labels))
    calls = f" in {operand.calls} calls" if operand.calls else ""
    facts = [
        ("rows", f"{operand.sampled} of {operand.rows}{calls}"),
        ("largest", f"{operand.amax:.4g}, usually {operand.usual_amax:.4g}"),
        ("root mean square", f"{operand.rms:.4g}"),
        ("zeros", format_share(operand.zeros)),
        ("non-finite", f"{operand.nonfinite} in {operand.nonfinite_calls} calls" if operand.nonfinite else "none"),
    ]
    spreads = (("rms to largest, row", operand.row_spread), ("rms to largest, 128", operand.block_spread))
    markers = (("rms", operand.rms), ("amax", operand.amax))
    return OperandChart(
        operand=operand.operand.value,
        heights=octaves.heights if octaves is not None else (),
        axis=axis,
        markers=tuple((name, axis.at(math.log2(each))) for name, each in markers if axis and 0 < each < math.inf),
        facts=(*facts, *((name, _spread(each)) for name, each in spreads if each is not None)),
        losses=tuple(
            (each.view.value, each.format.value, format_share(each.underflow), format_share(each.subnormal))
            for each in operand.shares
        ),
    )


def _spread(spread: Quantiles) -> str:
    return f"{spread.p50:.1f} octaves ({spread.p1:.1f} to {spread.p99:.1f})"
