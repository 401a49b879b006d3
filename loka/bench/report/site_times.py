"""Where the time of a training step goes, by site, beside BF16: bars of one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loka.bench.report.geometry import percent
from loka.bench.report.precision import Precision, fused_sites, site_precision
from loka.kernels.measurements.parts import TimeSource
from loka.plan.format import common_pattern, format_speedup, format_us, pattern_of
from loka.plan.plan import Plan, SitePlan
from loka.plan.report.plan_rows import name_of_group, site_groups
from loka.plan.select.interaction_times import step_times

SHOWN = 24  # rows; the others are summed up
_LEAST_CERTAIN = (TimeSource.MEASURED, TimeSource.INTERPOLATED, TimeSource.ESTIMATED)


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


def time_chart(plan: Plan, shown: int = SHOWN) -> TimeChart | None:
    """The chart of a plan; None where no measurement decided any site."""
    fused = fused_sites(plan)
    bars = [bar for group in site_groups(plan) if (bar := _site_bar(group, fused)) is not None]
    bars += _interaction_bars(plan)
    if not bars:
        return None
    bars.sort(key=lambda bar: (-max(bar.as_is_us, bar.us), bar.name))
    if len(bars) > shown:
        bars = [*bars[: shown - 1], _summed(bars[shown - 1 :])]
    inside = {name for each in plan.interactions for name in each.takes}
    untimed = sum(each.timing is None and each.site.name not in inside for each in plan.sites)
    return TimeChart(tuple(bars), max(max(bar.us, bar.as_is_us) for bar in bars), untimed)


def _site_bar(group: Sequence[SitePlan], fused: frozenset[str]) -> TimeBar | None:
    first = group[0]
    if first.timing is None or not first.site.calls:
        return None
    calls = first.site.calls * len(group)
    return TimeBar(
        name=name_of_group(group),
        note=f"{len(group)} alike" if len(group) > 1 else "",
        precision=site_precision(first, first.site.name in fused),
        us=first.timing.chosen.us * calls,
        as_is_us=first.timing.as_is.us * calls,
        source=first.timing.chosen.source,
    )


def _interaction_bars(plan: Plan) -> list[TimeBar]:
    groups: dict[tuple[object, ...], list[TimeBar]] = {}
    owners: dict[tuple[object, ...], list[str]] = {}
    for each, chosen, as_is in step_times(plan.interactions):
        key = (pattern_of(each.owner), each.what, chosen, as_is, each.calls)
        bar = TimeBar("", each.what, Precision.FUSED, chosen.us * each.calls, as_is.us * each.calls, chosen.source)
        groups.setdefault(key, []).append(bar)
        owners.setdefault(key, []).append(each.owner)
    return [_together(bars, common_pattern(owners[key]) or "the model itself") for key, bars in groups.items()]


def _together(bars: Sequence[TimeBar], name: str) -> TimeBar:
    note = f"{bars[0].note}, {len(bars)} alike" if len(bars) > 1 else bars[0].note
    us, as_is_us = sum(bar.us for bar in bars), sum(bar.as_is_us for bar in bars)
    return TimeBar(name, note, bars[0].precision, us, as_is_us, bars[0].source)


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
