"""What `loka diff` prints of two plans: totals first, then what changes, sites that change alike together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loka.cli.verbs.diff import show
from loka.plan.plan import Plan
from loka.plan.view.diff import diff
from loka.probe.profile.profile import Verdict
from tests.support.plan.report_plans import plan_of_sites, site_plan


def lines_of(before: Plan, after: Plan, capsys: pytest.CaptureFixture[str]) -> list[str]:
    show(diff(before, after), after)
    return capsys.readouterr().out.splitlines()


def test_totals_come_first_and_sites_that_change_alike_share_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    layers = [f"layers.{number}.up" for number in range(4)]
    before = plan_of_sites(*(site_plan(name, fp8=False, us=20.0) for name in layers), site_plan("old"))
    after = plan_of_sites(
        *(site_plan(name, region=("linear", "silu")) for name in layers[:3]),
        site_plan(layers[3], fp8=False, us=20.0),
        site_plan("new"),
    )
    assert lines_of(before, after, capsys) == [
        "3 of 5 sites to change, 1 to add, 1 to remove: 20.0 % -> 80.0 % of the training GEMM FLOPs in FP8.",
        "GEMMs with their norms, a training step: 90.0 -> 60.0 us",
        "change layers.0.up, layers.1.up, layers.2.up (3 sites, 30.0 % of the FLOPs): 20.0 -> 10.0 us",
        "    fprop, dgrad, wgrad: as-is -> e4m3 rowwise",
        "    region: none -> linear silu",
        "add new (10.0 % of the FLOPs)",
        "remove old",
    ]


def test_evidence_is_told_where_its_verdict_changed(capsys: pytest.CaptureFixture[str]) -> None:
    before = plan_of_sites(*(site_plan(f"a.{n}", fp8=False, us=20.0, mere=0.3, verdict=Verdict.UNSAFE) for n in "01"))
    after = plan_of_sites(*(site_plan(f"a.{n}", mere=0.1 + int(n) / 100) for n in "01"))
    lines = lines_of(before, after, capsys)
    assert lines[2] == "change a.* (2 sites, 20.0 % of the FLOPs): 20.0 -> 10.0 us"
    assert lines[3].startswith("    fprop, dgrad, wgrad: as-is -> e4m3 rowwise (unsafe, MERE 0.3 [")
    assert len(lines) == 4
    same = plan_of_sites(*(site_plan(f"a.{n}", fp8=False, us=20.0) for n in "01"))
    assert lines_of(same, after, capsys)[3] == "    fprop, dgrad, wgrad: as-is -> e4m3 rowwise"


def test_plans_that_decide_the_same_say_so_with_their_times(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = plan_of_sites(site_plan("a")), plan_of_sites(site_plan("a", us=12.0))
    assert lines_of(one, other, capsys) == [
        "Both decide the same: 100.0 % of the training GEMM FLOPs in FP8.",
        "GEMMs with their norms, a training step: 10.0 -> 12.0 us",
    ]
    larger = replace(one, batch_size=128)
    assert lines_of(one, larger, capsys)[:2] == [
        "1 of 1 sites to change: 100.0 % of the training GEMM FLOPs in FP8.",
        "batch size: 64 -> 128",
    ]
