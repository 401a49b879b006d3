"""What rows of predicted and actual errors come to, worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.held_out.held_out_cases import CASES, StudySizes
from benchmarks.held_out.held_out_report import markdown
from benchmarks.held_out.held_out_rows import COPULA, GAUSSIAN, HeldOutRow, JudgedRow, gaps, interval, misses
from loka.numerics.enums import Format, Gemm, Scaling
from loka.probe.profile.profile import Interval


def exactly(value: float) -> Interval:
    return Interval(value, value, value)


def row(
    site: str = "a",
    sampler: str = GAUSSIAN,
    sqnr: float | Interval = 30.0,
    mere: float | Interval = 0.1,
    actual_sqnr: float | Interval = 30.0,
    actual_mere: float | Interval = 0.1,
    gemm: Gemm = Gemm.FPROP,
) -> HeldOutRow:
    numbers = [v if isinstance(v, Interval) else exactly(v) for v in (mere, sqnr, actual_mere, actual_sqnr)]
    return HeldOutRow("Wukong", "clicks", site, gemm, Format.E4M3, Scaling.ROWWISE, sampler, *numbers)


def test_gaps_that_are_not_finite() -> None:
    met = row(sqnr=-math.inf, actual_sqnr=-math.inf, mere=math.inf, actual_mere=math.inf)
    assert (met.gap_db, met.gap_mere_percent) == (0.0, 0.0)
    missed = row(sqnr=20.0, actual_sqnr=-math.inf, mere=0.2, actual_mere=0.0)
    assert (missed.gap_db, missed.gap_mere_percent) == (math.inf, math.inf)
    assert gaps([row(), missed, missed]).db_median == math.inf


def test_an_interval_is_the_normal_one() -> None:
    found = interval([1.0, 2.0, 3.0, 6.0])
    half = 1.959963984540054 * math.sqrt((4 + 1 + 0 + 9) / 3) / 2
    assert found.mean == 3.0
    assert (found.low, found.high) == pytest.approx((3 - half, 3 + half))
    assert interval([5.0]) == exactly(5.0)
    assert interval([1.0, math.inf]) == exactly(math.inf)
    assert interval([1.0, -math.inf, 2.0]) == exactly(-math.inf)


def test_gaps_are_medians_and_percentiles_of_magnitudes() -> None:
    rows = [row(sqnr=30.0 + gap, mere=0.1 * (1 - gap / 10)) for gap in (-4.0, 0.0, 1.0, 2.0, 3.0)]
    found = gaps(rows)
    assert (found.count, found.db_median, found.db_p90) == (5, 2.0, pytest.approx(3.6))
    assert (found.mere_median, found.mere_p90) == (pytest.approx(20.0), pytest.approx(36.0))
    assert found.db_bias == 1.0


def test_exact_products_are_left_out() -> None:
    rows = [row(sqnr=31.0), row(sqnr=200.0, actual_sqnr=150.0)]
    assert rows[1].exact
    assert gaps(rows).count == 1
    assert math.isnan(gaps(rows[1:]).db_median)
    pair = [rows[1], replace(rows[1], sampler=COPULA)]
    assert misses(pair, COPULA, "SQNR").count == 0


def test_misses_compare_only_where_the_gaussian_is_outside_its_interval() -> None:
    wide, narrow = Interval(31.0, 29.0, 33.0), Interval(32.0, 31.5, 32.5)
    actual = Interval(30.0, 28.0, 32.0)
    rows = [
        row("inside", sqnr=wide, actual_sqnr=actual),
        row("inside", COPULA, sqnr=39.0, actual_sqnr=actual),
        row("touching", sqnr=narrow, actual_sqnr=actual),
        row("touching", COPULA, sqnr=29.5, actual_sqnr=actual),
        row("apart", sqnr=replace(narrow, mean=33.0, low=32.5, high=33.5), actual_sqnr=actual),
        row("apart", COPULA, sqnr=32.4, actual_sqnr=actual),
        row("alone", sqnr=narrow, actual_sqnr=actual),
    ]
    found = misses(rows, COPULA, "SQNR")
    assert (found.count, found.outside, found.resolved) == (3, 2, 1)
    assert found.share == pytest.approx(2 / 3)
    assert found.ratio_median == pytest.approx((0.25 + 0.8) / 2)
    assert found.halved == 0.5
    assert (found.resolved_ratio_median, found.resolved_halved) == (pytest.approx(0.8), 0.0)


def test_misses_in_mere_are_relative() -> None:
    rows = [row(mere=0.2, actual_mere=0.1), row(sampler=COPULA, mere=0.11, actual_mere=0.1)]
    found = misses(rows, COPULA, "MERE")
    assert (found.outside, found.ratio_median) == (1, pytest.approx(0.1))
    none = misses(rows, COPULA, "SQNR")
    assert (none.count, none.outside, none.share) == (1, 0, 0.0)
    assert math.isnan(none.ratio_median)
    assert math.isnan(none.halved)


def test_an_infinite_gap_of_the_other_sampler_is_no_improvement() -> None:
    rows = [row(sqnr=31.0), row(sampler=COPULA, sqnr=-math.inf)]
    found = misses(rows, COPULA, "SQNR")
    assert (found.ratio_median, found.halved) == (math.inf, 0.0)


def test_the_report_holds_the_figures_and_says_what_is_missed() -> None:
    rows = (
        row(sqnr=32.0, mere=0.2),
        row(sampler=COPULA, sqnr=30.25, mere=0.101),
        row("exact", actual_sqnr=150.0),
    )
    judged = JudgedRow(CASES["ranker"], rows, {"train": 1.4, "draw": 2.0})
    text = markdown("python -m benchmarks.held_out --model ranker", [judged], StudySizes(seed=7))
    figures = "0.25 (2.00) | yes | 1.0 (100.0) | yes | 0.12 (100 % of 1) | yes | 0.01 (100 % of 1) | yes |"
    assert f"| all | {figures}" in text
    assert f"| fprop | {figures}" in text
    assert "| gaussian | 1 | 2.00 | 2.00 | 100.0 | 100.0 | +2.00 |" in text
    assert "| Wukong | embedded clicks | 512 | 400 | 0.001 | 2 | 3 |" in text
    assert "Seed 7" in text
    assert "1 x fprop e4m3 rowwise of `exact`" in text
    worse = markdown(
        "x", [replace(judged, rows=(rows[0], replace(rows[1], predicted_sqnr=exactly(31.5))))], StudySizes()
    )
    assert "| all | 1.50 (2.00) | **no** | 1.0 (100.0) | yes | 0.75 (0 % of 1) | **no** |" in worse
