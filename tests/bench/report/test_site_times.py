"""Bars of times."""

from __future__ import annotations

from loka.bench.report.precision import Precision
from loka.bench.report.site_times import time_chart
from loka.kernels.measurements.parts import TimeSource
from tests.support.plan.report_plans import interaction, plan_of_sites, site_plan


def test_alike_sites_are_added_up_and_the_slowest_is_first() -> None:
    plan = plan_of_sites(
        site_plan("head", us=30.0, as_is_us=25.0, fp8=False),
        *(site_plan(f"layers.{i}", us=10.0, as_is_us=20.0) for i in range(3)),
        site_plan("new", us=None),
        interactions=(interaction("blocks.0"), interaction("blocks.1"), interaction("odd", as_is_us=None)),
    )
    chart = time_chart(plan)
    assert chart is not None
    assert [(bar.name, bar.us, bar.as_is_us, bar.precision) for bar in chart.bars] == [
        ("blocks.*", 10.0, 100.0, Precision.FUSED),
        ("layers.*", 30.0, 60.0, Precision.E4M3),
        ("head", 30.0, 25.0, Precision.NATIVE),
    ]
    assert [bar.note for bar in chart.bars] == ["a mixing layer of 4 embeddings, 2 alike", "3 alike", ""]
    assert (chart.longest, chart.width(50.0), chart.untimed) == (100.0, 50.0, 1)
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


def test_sites_within_an_interaction_are_not_untimed() -> None:
    plan = plan_of_sites(site_plan("a", us=None), interactions=(interaction("", takes=("a",)),))
    chart = time_chart(plan)
    assert chart is not None
    assert (chart.untimed, chart.bars[0].name) == (0, "the model itself")


def test_without_times_there_is_no_chart() -> None:
    assert time_chart(plan_of_sites(site_plan("a", us=None))) is None
