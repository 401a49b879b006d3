"""Histograms of a profile's operands."""

from __future__ import annotations

from dataclasses import replace

from loka.bench.report.distributions import distributions
from loka.numerics.enums import Operand
from loka.plan.evidence import ProfiledSites
from loka.plan.view.histogram import octaves_of
from loka.probe.stats.site_stats import LOWEST, MAGNITUDE_BINS, PER_OCTAVE
from tests.support.plan.report_plans import plan_of_sites, site_plan
from tests.support.plan.shop_profile import operand, profile_of

PLAN = plan_of_sites(site_plan("dense", share=0.2), site_plan("layers.0.up", share=0.7), site_plan("unseen"))


def test_the_largest_sites_are_kept_in_model_order() -> None:
    found = distributions(PLAN, ProfiledSites.of(profile_of({})), shown=1)
    assert ([site.name for site in found.sites], found.left_out) == (["layers.0.up"], 1)


def test_an_operand_of_zeros_has_no_bars_and_one_never_seen_no_place() -> None:
    profile = profile_of({})
    zeros = replace(operand(Operand.INPUT, 13), magnitudes=(0,) * MAGNITUDE_BINS, amax=0.0, rms=0.0)
    site = replace(profile.sites[0], operands=(zeros,))
    (found,) = distributions(PLAN, ProfiledSites.of(replace(profile, sites=(site,)))).sites
    (chart,) = found.operands.values()
    assert (chart.heights, chart.axis, chart.markers) == ((), None, ())
    assert chart.words == "Magnitudes of the input, only zeros"


def test_octaves_are_whole_labels_and_logarithmic() -> None:
    counts = [0] * MAGNITUDE_BINS
    counts[(3 - LOWEST[Operand.INPUT]) * PER_OCTAVE] = 9
    counts[(4 - LOWEST[Operand.INPUT]) * PER_OCTAVE] = 99
    found = octaves_of(Operand.INPUT, counts)
    assert found is not None
    assert (found.first, list(found.labels)) == (0, [0, 8])
    assert [round(height, 3) for height in found.heights] == [0, 0, 0, 0.5, 1.0, 0, 0, 0]
    assert octaves_of(Operand.INPUT, [0] * MAGNITUDE_BINS) is None
