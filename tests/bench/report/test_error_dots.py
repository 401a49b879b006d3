"""Dots of errors against budgets."""

from __future__ import annotations

import math
from dataclasses import replace

from loka.bench.report.error_dots import Judged, dot_chart, judged
from loka.plan.plan import GemmPlan
from loka.probe.profile.profile import Interval, Verdict
from tests.support.plan.report_plans import plan_of_sites, site_plan


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
    assert [row.name for row in chart.rows] == ["near", "wide", "easy", "kept"]
    assert [dot.fp8 for row in chart.rows for dot in row.dots[:1]] == [True, True, True, False]
    near, wide = chart.rows[:2]
    assert near.budget_at[0] == chart.mere.at(0.2) < wide.budget_at[0] == chart.mere.at(1.0)
    assert near.budget_at[1] == chart.sqnr.at(24.0)
    low, mean, high = near.dots[0].mere
    assert low < mean < high < near.budget_at[0] + 1
    assert chart.budget is None
    assert near.words.startswith("near, budget MERE 0.2 and SQNR 24 dB: fprop: MERE 0.19 [0.171, 0.209], SQNR 30.0 [")


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
    assert {dot.mere[1] for dot in row.dots} == {chart.mere.at(0.15)}


def test_an_exact_or_a_lost_product_is_at_an_end_of_the_axes() -> None:
    site = site_plan("a")

    def with_infinity(gemm: GemmPlan) -> GemmPlan:
        assert gemm.evidence is not None
        infinite = Interval(math.inf, math.inf, math.inf)
        return replace(gemm, evidence=replace(gemm.evidence, mere=infinite, sqnr_db=infinite))

    chart = dot_chart(plan_of_sites(replace(site, gemms=tuple(map(with_infinity, site.gemms)))))
    assert chart is not None
    assert {dot.mere[1] for dot in chart.rows[0].dots} == {100.0}
    assert {dot.sqnr[1] for dot in chart.rows[0].dots} == {100.0}


def test_without_evidence_there_is_no_chart() -> None:
    assert dot_chart(plan_of_sites(site_plan("a", mere=None))) is None


def test_verdicts_of_gemms_in_fp8_are_counted() -> None:
    plan = plan_of_sites(
        site_plan("a"),
        site_plan("b", verdict=Verdict.UNSAFE),
        site_plan("c", verdict=Verdict.UNDECIDED),
        site_plan("d", mere=None),
        site_plan("e", fp8=False, verdict=Verdict.UNSAFE),
    )
    assert judged(plan) == Judged(3, 3, 3, 3)
    assert judged(plan).total == 12
