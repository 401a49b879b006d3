"""The distributions of operands that a profile holds, as histograms over octaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loka.bench.report.geometry import Bar, columns, percent
from loka.numerics.enums import Operand
from loka.plan.evidence import ProfiledSites
from loka.plan.format import format_share
from loka.plan.plan import Plan
from loka.plan.report.histogram import Octaves, octaves_of
from loka.probe.profile.profile import OperandSummary, Quantiles, Shares

SHOWN = 40  # sites, those with most FLOPs


@dataclass(frozen=True, slots=True)
class Marker:
    """A value on the axis, in per cent."""

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class OctaveLabel:
    """A label of the axis: 2 to the power of `exponent`, in per cent."""

    exponent: int
    at: float


@dataclass(frozen=True, slots=True)
class OperandChart:
    """One operand of a site. Heights are logarithms of counts."""

    operand: str  # "input"
    bars: tuple[Bar, ...]  # none for an operand of zeros
    labels: tuple[OctaveLabel, ...]
    markers: tuple[Marker, ...]
    facts: tuple[tuple[str, str], ...]  # ("amax", "12.4, usually 8.1"), ...
    losses: tuple[tuple[str, str, str, str], ...]  # scale, format, underflow, subnormal

    @property
    def words(self) -> str:
        """The chart as a sentence."""
        span = f", from 2^{self.labels[0].exponent} to 2^{self.labels[-1].exponent}" if self.labels else ", only zeros"
        return f"Magnitudes of the {self.operand.replace('_', ' ')}{span}"


@dataclass(frozen=True, slots=True)
class SiteDistributions:
    """A site of the profile with its operands."""

    name: str
    share: float  # of the model's forward FLOPs
    operands: tuple[OperandChart, ...]
    opened: bool = False  # that with most FLOPs

    @property
    def small(self) -> tuple[OperandChart | None, ...]:
        """The chart of each operand that a site may have, None for one that was not seen."""
        found = {chart.operand: chart for chart in self.operands}
        return tuple(found.get(operand.value) for operand in Operand)


@dataclass(frozen=True, slots=True)
class Distributions:
    """The sites with most FLOPs, in model order."""

    sites: tuple[SiteDistributions, ...]
    left_out: int


def distributions(plan: Plan, known: ProfiledSites, shown: int = SHOWN) -> Distributions:
    """The distributions of a plan's sites that the profile recorded."""
    seen = [
        (site.site.name, site.site.share, found.operands)
        for site in plan.sites
        if (found := known.sites.get(site.site.name)) is not None and found.operands
    ]
    largest = [name for name, _, _ in sorted(seen, key=lambda each: -each[1])[:shown]]
    sites = tuple(
        SiteDistributions(name, share, tuple(map(_chart, operands)), name == largest[0])
        for name, share, operands in seen
        if name in largest
    )
    return Distributions(sites, len(seen) - len(sites))


def _chart(operand: OperandSummary) -> OperandChart:
    octaves = octaves_of(operand.operand, operand.magnitudes)
    calls = f" in {operand.calls} calls" if operand.calls else ""
    facts = [
        ("rows", f"{operand.sampled} of {operand.rows}{calls}"),
        ("largest", f"{operand.amax:.4g}, usually {operand.usual_amax:.4g}"),
        ("root mean square", f"{operand.rms:.4g}"),
        ("zeros", format_share(operand.zeros)),
        ("non-finite", f"{operand.nonfinite} in {operand.nonfinite_calls} calls" if operand.nonfinite else "none"),
    ]
    spreads = (("rms to largest, row", operand.row_spread), ("rms to largest, 128", operand.block_spread))
    facts += [(name, _spread(each)) for name, each in spreads if each is not None]
    return OperandChart(
        operand=operand.operand.value,
        bars=columns(octaves.heights) if octaves is not None else (),
        labels=_labels(octaves) if octaves is not None else (),
        markers=_markers(octaves, operand) if octaves is not None else (),
        facts=tuple(facts),
        losses=_losses(operand.shares),
    )


def _labels(octaves: Octaves) -> tuple[OctaveLabel, ...]:
    return tuple(OctaveLabel(each, percent((each - octaves.first) / len(octaves.counts))) for each in octaves.labels)


def _markers(octaves: Octaves, operand: OperandSummary) -> tuple[Marker, ...]:
    values = (("rms", operand.rms), ("amax", operand.amax))
    return tuple(
        Marker(name, percent(min(max((math.log2(value) - octaves.first) / len(octaves.counts), 0.0), 1.0)))
        for name, value in values
        if 0 < value < math.inf
    )


def _losses(shares: Sequence[Shares]) -> tuple[tuple[str, str, str, str], ...]:
    return tuple(
        (each.view.value, each.format.value, format_share(each.underflow), format_share(each.subnormal))
        for each in shares
    )


def _spread(spread: Quantiles) -> str:
    return f"{spread.p50:.1f} octaves ({spread.p1:.1f} to {spread.p99:.1f})"
