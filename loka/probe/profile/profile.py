"""The profile as planning reads it: the summary of each site, and the estimated FP8 error of each of its GEMMs.

The annotations say which values a Probe can produce; pydantic holds them where a profile is written or read
(`profile_file`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from loka.mods.adaptation import ModFingerprint
from loka.numerics.enums import OPERANDS, Format, Gemm, Operand
from loka.numerics.recipe import OperandPair
from loka.policy.settings import Budget
from loka.probe.stats.site_stats import MAGNITUDE_BINS, Count, Figure, HistogramView, SiteStats

CONFIDENCE = 0.95

Share = Annotated[float, Field(ge=0, le=1)]


class Verdict(StrEnum):
    """Judgement of a GEMM by the evidence for a recipe and a budget."""

    SAFE = "safe"  # both intervals are within the budget
    UNSAFE = "unsafe"  # one is wholly outside
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % confidence interval. If `mean` is infinite, so are the ends."""

    mean: float
    low: float
    high: float


def _ordered(found: Interval) -> Interval:
    infinite = math.isinf(found.mean) and not found.low == found.mean == found.high
    if infinite or not found.low <= found.mean <= found.high:  # false for NaN
        raise ValueError(f"{found.mean} within {found.low} to {found.high} is no interval")
    return found


def _of_errors(found: Interval) -> Interval:
    if found.low < 0:
        raise ValueError(f"an error of {found.low}, but must be 0 or more")
    return found


def _with_maxima(operands: OperandPair) -> OperandPair:
    if not all(recipe.amax is None or 0 <= recipe.amax < math.inf for recipe in operands):
        raise ValueError("a static range must be finite and 0 or more")
    return operands


Ordered = Annotated[Interval, AfterValidator(_ordered)]
Operands = Annotated[OperandPair, AfterValidator(_with_maxima)]


def sum_of_changes(changes: Sequence[Interval]) -> Interval:
    """The sum of changes of NE by several sites.

    The ends are added too: all were measured on one trained model and the same batches, so that they err together.
    """
    lows, means, highs = ([getattr(each, end) for each in changes] for end in ("low", "mean", "high"))
    return Interval(math.fsum(means), math.fsum(lows), math.fsum(highs))


@dataclass(frozen=True, slots=True)
class Estimate:
    """The error of one GEMM of a site with its operands quantized by `operands`, predicted from the statistics."""

    gemm: Gemm
    operands: Operands  # in the order of enums.OPERANDS[gemm]
    mere: Annotated[Ordered, AfterValidator(_of_errors)]  # floored (numerics.metrics)
    sqnr_db: Ordered
    draws: Count  # sampled pairs of operands

    def verdict(self, budget: Budget) -> Verdict:
        """The verdict on `budget`'s mere and sqnr_db for this recipe."""
        if self.mere.high <= budget.mere and self.sqnr_db.low >= budget.sqnr_db:
            return Verdict.SAFE
        if self.mere.low > budget.mere or self.sqnr_db.high < budget.sqnr_db:
            return Verdict.UNSAFE
        return Verdict.UNDECIDED


@dataclass(frozen=True, slots=True)
class NeEstimate:
    """The change of NE by one GEMM of a site with its operands quantized by `operands`, measured on the trained model.

    NE is the log loss over a constant; for another loss, it is the relative change of that.
    """

    gemm: Gemm
    operands: Operands  # in the order of enums.OPERANDS[gemm]
    ne_percent: Ordered  # in per cent of NE, positive is worse; expected over trainings
    run_percent: Figure  # standard deviation of what a single training differs from that by
    varying_error: (
        Annotated[float, Field(ge=0)] | None
    )  # power of the error over that of y, both without their mean over samples; fprop's


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of an operand's elements lost with a dynamic scale, relative to all elements, 0 to 1."""

    view: HistogramView
    format: Format
    underflow: Share  # rounded to zero
    subnormal: Share  # kept with fewer bits


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The 1st, 25th, 50th, 75th and 99th percentile."""

    p1: Figure
    p25: Figure
    p50: Figure
    p75: Figure
    p99: Figure


@dataclass(frozen=True, slots=True)
class OperandSummary:
    """Summary of one operand of a site. For a weight `calls` is 0, and `rows` and `sampled` are its rows."""

    operand: Operand
    width: Count  # features C of the matrix (rows, C)
    calls: Count
    rows: Count
    sampled: Count
    nonfinite: Count  # elements among the sampled rows
    nonfinite_calls: Count
    zeros: Share  # share of elements
    amax: Figure  # largest finite |x| seen
    usual_amax: Figure  # median over calls
    rms: Figure
    magnitudes: Annotated[  # counts of |x|, zeros left out; lowest octave LOWEST
        tuple[Count, ...], Field(min_length=MAGNITUDE_BINS, max_length=MAGNITUDE_BINS)
    ]
    shares: tuple[Shares, ...]  # every View x Format; none for a weight
    row_spread: Quantiles | None  # octaves from rms to amax within a row
    block_spread: Quantiles | None  # the same within 128 neighbours
    covariance_error: Figure  # relative error ||C - C'||_F / ||C||_F of the low-rank covariance C'; 0 if it is full


@dataclass(frozen=True, slots=True)
class SiteProfile:
    """One site. `operands` are those that were seen; a site that never ran has none and no estimates."""

    name: str
    k: Count
    n: Count
    rows: Count  # M of the last call
    operands: tuple[OperandSummary, ...]
    estimates: tuple[Estimate, ...]
    ne: tuple[NeEstimate, ...] = ()

    def operand(self, operand: Operand) -> OperandSummary | None:
        """The summary of an operand; None if it was not seen."""
        return next((each for each in self.operands if each.operand is operand), None)

    def estimate(self, gemm: Gemm, operands: OperandPair) -> Estimate | None:
        """The estimate of a GEMM for a recipe, or for that recipe `with_ranges`; None if neither was made."""
        mine = [each for each in self.estimates if each.gemm is gemm]
        wanted = (operands, with_ranges(self, gemm, operands)[0])
        return next((each for pair in wanted for each in mine if each.operands == pair), None)

    def ne_estimate(self, gemm: Gemm, operands: OperandPair) -> NeEstimate | None:
        """The change of NE by a GEMM with exactly this recipe; None if it was not measured."""
        return next((each for each in self.ne if (each.gemm, each.operands) == (gemm, operands)), None)


def with_ranges(seen: SiteProfile | None, gemm: Gemm, requested: OperandPair) -> tuple[OperandPair, str | None]:
    """The recipes with the largest |x| seen for each static range without `amax`, and None.

    Where an operand was never seen, or was always zero, the recipes as requested and the reason.
    """
    ranged = []
    for operand, recipe in zip(OPERANDS[gemm], requested, strict=True):
        if recipe.lacks_amax:
            summary = seen.operand(operand) if seen is not None else None
            if summary is None or not summary.amax > 0:
                what = "never seen" if summary is None else "nothing but zeros"
                return requested, (
                    f"range: static: {operand.value} was {what} while probing; give amax, or use range: dynamic"
                )
            recipe = replace(recipe, amax=summary.amax)
        ranged.append(recipe)
    return (ranged[0], ranged[1]), None


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause of lost accuracy at a site, with figures and a remedy."""

    site: str
    kind: str  # listed in findings.py
    evidence: str
    remedy: str  # a mod or a setting, in policy syntax


def _apart(sites: tuple[SiteProfile, ...]) -> tuple[SiteProfile, ...]:
    names: set[str] = set()
    for site in sites:
        if site.name in names:
            raise ValueError(f"two sites are called {site.name!r}")
        names.add(site.name)
    return sites


@dataclass(frozen=True, slots=True)
class Profile:
    """The summary form of a profile, which `loka plan` reads."""

    name: str  # of the policy
    model: str  # its factory
    loka_version: str
    created: str  # UTC, ISO 8601, when it was saved
    steps: Count  # training steps up to the last sample
    every: Count  # one step in this number was sampled
    samples: Count  # sampled steps, over all ranks and runs
    batch_size: Count  # samples in a step of one rank
    sites: Annotated[tuple[SiteProfile, ...], AfterValidator(_apart)]
    findings: tuple[Finding, ...]
    mods: tuple[ModFingerprint, ...] = ()  # that changed the model
    synthetic: bool = False  # of example inputs and labels drawn at random, for want of a training function

    def site(self, name: str) -> SiteProfile | None:
        """The profile of a site; None if it is not included."""
        return next((site for site in self.sites if site.name == name), None)


@dataclass(frozen=True, slots=True)
class RecordedStats:
    """The full form of a profile: statistics that can be merged and used for estimates, and the summary.

    While training writes it, `profile` has no estimates yet: they are made offline.
    """

    profile: Profile
    stats: tuple[SiteStats, ...]  # one for each of profile.sites, in that order
