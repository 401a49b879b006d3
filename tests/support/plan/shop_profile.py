"""A made-up profile of the small model that tests of the command line plan."""

from __future__ import annotations

from loka.numerics.enums import Format, Gemm, Operand
from loka.numerics.recipe import OperandRecipe
from loka.probe.profile.profile import (
    Estimate,
    Finding,
    Interval,
    OperandSummary,
    Profile,
    Quantiles,
    Shares,
    SiteProfile,
)
from loka.probe.stats.site_stats import MAGNITUDE_BINS, HistogramView

SIZES = {"dense": (13, 32), "layers.0.up": (24, 32), "layers.1.up": (24, 32), "layers.0.down": (32, 24)}


def operand(which: Operand, width: int) -> OperandSummary:
    counts = [0] * MAGNITUDE_BINS
    counts[60:70] = [1, 5, 20, 100, 300, 300, 100, 20, 5, 1]
    weight = which is Operand.WEIGHT
    shares = () if weight else tuple(Shares(view, format, 0.015, 0.25) for view in HistogramView for format in Format)
    spread = Quantiles(1.0, 1.5, 2.0, 2.5, 3.0)
    return OperandSummary(
        which, width, 0 if weight else 20, 1280, 1280, 0, 0, 0.125, 2.5, 1.25, 0.5, tuple(counts), shares, spread,
        None, 0.0,
    )  # fmt: skip


def profile_of(mere: dict[str, float], sites: dict[str, tuple[int, int]] = SIZES) -> Profile:
    """A profile in which every GEMM of a site has the MERE that is given for it, else 0.03."""

    def estimates(name: str) -> tuple[Estimate, ...]:
        mean = mere.get(name, 0.03)
        around = Interval(mean, mean - 0.01, mean + 0.01)
        pair = (OperandRecipe(), OperandRecipe())
        return tuple(Estimate(gemm, pair, around, Interval(30.0, 29.5, 30.5), 16) for gemm in Gemm)

    found = tuple(
        SiteProfile(name, k, n, 64, tuple(operand(each, k) for each in Operand), estimates(name))
        for name, (k, n) in sites.items()
    )
    findings = (Finding("dense", "row_dominates", "one row has 40 times the rest", "scaling: rowwise"),)
    return Profile("shop", "shopmodel:build", "0.1.0", "2026-01-01T00:00:00Z", 200, 10, 20, 64, found, findings)
