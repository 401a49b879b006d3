"""The distributions of operands that a profile holds, as histograms over octaves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loka.bench.report.geometry import Axis
from loka.plan.evidence import ProfiledSites
from loka.plan.format import format_share
from loka.plan.plan import Plan
from loka.plan.view.histogram import octaves_of
from loka.probe.profile.profile import OperandSummary, Quantiles

SHOWN = 40  # sites, those with most FLOPs


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


def distributions(plan: Plan, known: ProfiledSites, shown: int = SHOWN) -> Distributions:
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
