"""Bars of times, dots of errors against budgets, and histograms of a profile's operands."""

from __future__ import annotations

import math
from dataclasses import replace

from loka.bench.report.model_tree import Precision
from loka.bench.report.site_charts import distributions, dot_chart, time_chart
from loka.kernels.measurements.parts import TimeSource
from loka.numerics.enums import Operand
from loka.plan.evidence import ProfiledSites
from loka.plan.plan import GemmPlan
from loka.plan.view.histogram import octaves_of
from loka.probe.profile.profile import Interval
from loka.probe.stats.site_stats import LOWEST, MAGNITUDE_BINS, PER_OCTAVE
from tests.support.plan.report_plans import interaction, plan_of_sites, site_plan
from tests.support.plan.shop_profile import operand, profile_of

PLAN = plan_of_sites(site_plan("dense", share=0.2), site_plan("layers.0.up", share=0.7), site_plan("unseen"))


def test_alike_sites_are_added_up_and_the_slowest_is_first() -> None:
    plan = plan_of_sites(
        site_plan("head", us=30.0, as_is_us=25.0, fp8=False),
        *(site_plan(f"layers.{i}", us=10.0, as_is_us=20.0) for i in range(3)),
        site_plan("new", us=None),
        site_plan("inside", us=None),
        interactions=(
            *(interaction("blocks.0"), interaction("blocks.1"), interaction("odd", as_is_us=None)),
            interaction("", us=1.0, as_is_us=2.0, takes=("inside",)),
        ),
    )
    chart = time_chart(plan)
    assert chart is not None
    assert [(bar.name, bar.us, bar.as_is_us, bar.precision) for bar in chart.bars] == [
        ("blocks.*", 10.0, 100.0, Precision.FUSED),
        ("layers.*", 30.0, 60.0, Precision.E4M3),
        ("head", 30.0, 25.0, Precision.NATIVE),
        ("the model itself", 1.0, 2.0, Precision.FUSED),
    ]
    notes = ["a mixing layer of 4 embeddings, 2 alike", "3 alike", "", "a mixing layer of 4 embeddings"]
    assert [bar.note for bar in chart.bars] == notes
    assert (chart.longest, chart.untimed) == (100.0, 1)
    assert chart.bars[1].words == "layers.*: 30.0 us planned, 60.0 us in BF16, 2.00x, measured"


def test_many_rows_are_summed_up() -> None:
    sites = [site_plan(chr(97 + i), us=1.0, as_is_us=30.0 - i) for i in range(9)]
    sites.append(site_plan("z", us=2.0, as_is_us=2.0, source=TimeSource.ESTIMATED))
    chart = time_chart(plan_of_sites(*sites), shown=4)
    assert chart is not None
    *first, rest = chart.bars
    assert [bar.name for bar in first] == ["a", "b", "c"]
    assert (rest.name, rest.us, rest.source) == ("7 smaller ones", 8.0, TimeSource.ESTIMATED)
    assert sum(bar.as_is_us for bar in chart.bars) == sum(30.0 - i for i in range(9)) + 2.0


def test_without_times_or_evidence_there_is_no_chart() -> None:
    plan = plan_of_sites(site_plan("a", us=None, mere=None))
    assert (time_chart(plan), dot_chart(plan)) == (None, None)


def test_the_row_nearest_to_its_budget_is_first_and_kept_ones_are_last() -> None:
    plan = plan_of_sites(
        site_plan("kept", fp8=False, mere=0.5),
        site_plan("easy", mere=0.02),
        site_plan("wide", mere=0.3, budget=1.0),
        site_plan("near", mere=0.19),
        site_plan("unseen", mere=None),
    )
    chart = dot_chart(plan)
    assert chart is not None
    assert [(row.name, row.budget.mere) for row in chart.rows] == [
        ("near", 0.2),
        ("wide", 1.0),
        ("easy", 0.2),
        ("kept", 0.2),
    ]
    assert chart.budget is None
    assert chart.rows[0].words.startswith("near, budget MERE 0.2 and SQNR 24 dB: fprop: MERE 0.19 [0.171, 0.209], SQNR")
    assert "dgrad (not in FP8): MERE 0.5" in chart.rows[-1].words
    assert chart.mere.high >= 1.0


def test_one_budget_of_all_rows_is_known_and_rows_can_be_left_out() -> None:
    chart = dot_chart(plan_of_sites(*(site_plan(chr(97 + i), mere=0.1 - i / 100) for i in range(5))), shown=3)
    assert chart is not None
    assert chart.budget is not None
    assert (len(chart.rows), chart.left_out, chart.budget.mere) == (3, 2, 0.2)


def test_alike_sites_show_the_worst_of_each_gemm() -> None:
    chart = dot_chart(plan_of_sites(site_plan("layers.0", mere=0.1), site_plan("layers.1", mere=0.15)))
    assert chart is not None
    (row,) = chart.rows
    assert (row.name, row.count) == ("layers.*", 2)
    assert {each.mere.mean for _, each in row.dots} == {0.15}


def test_an_exact_or_a_lost_product_is_at_an_end_of_the_axes() -> None:
    site = site_plan("a")

    def with_infinity(gemm: GemmPlan) -> GemmPlan:
        assert gemm.evidence is not None
        infinite = Interval(math.inf, math.inf, math.inf)
        return replace(gemm, evidence=replace(gemm.evidence, mere=infinite, sqnr_db=infinite))

    chart = dot_chart(plan_of_sites(replace(site, gemms=tuple(map(with_infinity, site.gemms)))))
    assert chart is not None
    assert (chart.mere.at(math.inf), chart.sqnr.at(math.inf)) == (100.0, 100.0)


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
