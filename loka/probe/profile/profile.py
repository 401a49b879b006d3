"""The profile as planning reads it: the summary of each site, and the estimated FP8 error of each of its GEMMs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from loka.mods.fingerprint import ModFingerprint
from loka.numerics.enums import Format, Gemm, Operand
from loka.numerics.recipe import OperandPair
from loka.policy.settings import Budget
from loka.probe.stats.bins import HistogramView

VERSION = 2  # of the file's layout; 2: with a checksum
CONFIDENCE = 0.95


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
    operands: OperandPair  # in the order of enums.OPERANDS[gemm]
    mere: Interval  # floored (numerics.metrics)
    sqnr_db: Interval
    draws: int  # sampled pairs of operands

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
    operands: OperandPair  # in the order of enums.OPERANDS[gemm]
    ne_percent: Interval  # in per cent of NE, positive is worse; expected over trainings
    run_percent: float  # standard deviation of what a single training differs from that by
    varying_error: float | None  # power of the error over that of y, both without their mean over samples; fprop's


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of an operand's elements lost with a dynamic scale, relative to all elements, 0 to 1."""

    view: HistogramView
    format: Format
    underflow: float  # rounded to zero
    subnormal: float  # kept with fewer bits


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The 1st, 25th, 50th, 75th and 99th percentile."""

    p1: float
    p25: float
    p50: float
    p75: float
    p99: float


@dataclass(frozen=True, slots=True)
class OperandSummary:
    """Summary of one operand of a site. For a weight `calls` is 0, and `rows` and `sampled` are its rows."""

    operand: Operand
    width: int  # features C of the matrix (rows, C)
    calls: int
    rows: int
    sampled: int
    nonfinite: int  # elements among the sampled rows
    nonfinite_calls: int
    zeros: float  # share of elements
    amax: float  # largest finite |x| seen
    usual_amax: float  # median over calls
    rms: float
    magnitudes: tuple[int, ...]  # (bins.MAGNITUDE_BINS,) counts of |x|, zeros left out; lowest octave bins.LOWEST
    shares: tuple[Shares, ...]  # every View x Format; none for a weight
    row_spread: Quantiles | None  # octaves from rms to amax within a row
    block_spread: Quantiles | None  # the same within 128 neighbours
    covariance_error: float  # relative error ||C - C'||_F / ||C||_F of the low-rank covariance C'; 0 if it is full


@dataclass(frozen=True, slots=True)
class SiteProfile:
    """One site. `operands` are those that were seen; a site that never ran has none and no estimates."""

    name: str
    k: int
    n: int
    rows: int  # M of the last call
    operands: tuple[OperandSummary, ...]
    estimates: tuple[Estimate, ...]
    ne: tuple[NeEstimate, ...] = ()  # also () if the file does not record them

    def ne_estimate(self, gemm: Gemm, operands: OperandPair) -> NeEstimate | None:
        """The change of NE by a GEMM with exactly this recipe; None if it was not measured."""
        return next((each for each in self.ne if (each.gemm, each.operands) == (gemm, operands)), None)


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause of lost accuracy at a site, with figures and a remedy."""

    site: str
    kind: str  # listed in findings.py
    evidence: str
    remedy: str  # a mod or a setting, in policy syntax


@dataclass(frozen=True, slots=True)
class Profile:
    """The summary form of a profile, which `loka plan` reads."""

    name: str  # of the policy
    model: str  # its factory
    loka_version: str
    created: str  # UTC, ISO 8601, when it was saved
    steps: int  # training steps up to the last sample
    every: int  # one step in this number was sampled
    samples: int  # sampled steps, over all ranks and runs
    batch_size: int  # samples in a step of one rank
    sites: tuple[SiteProfile, ...]
    findings: tuple[Finding, ...]
    mods: tuple[ModFingerprint, ...] = ()  # that changed the model; also () if the file does not record mods
    synthetic: bool = False  # of example inputs and labels drawn at random, for want of a training function

    def site(self, name: str) -> SiteProfile | None:
        """The profile of a site; None if it is not included."""
        return next((site for site in self.sites if site.name == name), None)
