"""The verdict on a plan in one sentence, and the times of a step in three columns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loka.devices.spec import Execution
from loka.mods.adaptation import RewriteResult
from loka.plan.plan import ModPlan, Plan, TunedStep
from loka.plan.view.verdict import step_sentences, step_table, verdict
from loka.policy.policy import ExecutionSpec
from tests.support.plan.report_plans import plan_of_sites, site_plan


def rows(plan: Plan) -> list[tuple[str, ...]]:
    found = step_table(plan)
    assert found is not None
    return found[1]


def test_it_says_what_fusing_and_what_fp8_gains() -> None:
    plan = plan_of_sites(site_plan("a", us=10.0, without_fp8_us=15.0, as_is_us=20.0), site_plan("b", fp8=False, us=5.0))
    assert verdict(plan) == (
        "shop for h100 at batch size 64: 2.67x over compiled BF16 is predicted for GEMMs with their norms, of which "
        "fusing gains 2.00x and FP8 itself gains 1.33x; 1 of 2 sites in FP8, 50.0 % of the training GEMM FLOPs"
    )
    assert rows(plan) == [("us of the GPU", "40.0", "20.0", "15.0"), ("speed-up", "1.00x", "2.00x", "2.67x")]


def test_it_says_what_fp8_slows_and_what_would_change_that() -> None:
    slowed = (site_plan(name, us=10.0, without_fp8_us=8.0) for name in "ab")
    found = verdict(plan_of_sites(*slowed, site_plan("c", us=10.0)))
    assert "FP8 itself makes it slower, " not in found  # the third gains more
    assert found.endswith("; FP8 slows 2 of them, which compute: auto would leave in BF16")
    alone = verdict(plan_of_sites(site_plan("a", us=10.0, without_fp8_us=8.0)))
    assert "FP8 itself makes it slower, 0.80x; 1 of 1 sites in FP8" in alone
    assert alone.endswith("; FP8 slows it, which compute: auto would leave in BF16")


def test_a_short_step_may_wait_for_its_host_and_a_long_one_is_said_to_by_nobody() -> None:
    short, long = (plan_of_sites(site_plan("a", us=us, as_is_us=2 * us)) for us in (400.0, 600.0))
    assert any("may wait for its host" in sentence for sentence in step_sentences(short))
    assert not any("host" in sentence for sentence in step_sentences(long))


def test_a_plan_without_fp8_has_no_third_column() -> None:
    plan = plan_of_sites(site_plan("a", fp8=False, us=10.0, as_is_us=20.0))
    gained = "2.00x over compiled BF16 is predicted for GEMMs with their norms"
    assert verdict(plan).endswith(f": {gained}; nothing in FP8, of 1 site")
    assert [len(row) for row in rows(plan)] == [3, 3]


def test_sites_that_a_mod_joins_are_counted_as_the_model_has_them() -> None:
    joined = RewriteResult("merge_siblings", "", ("q", "k", "v"), "q+k+v", "3 linears as one")
    alone = RewriteResult("pad_alignment", "", ("b",), "b", "N 1 padded to 8")
    mods = tuple(
        ModPlan(each.mod, f"mod {i}: {each.mod}", "a.yaml:3", True, "", rewritten=(each,))
        for i, each in enumerate((joined, alone))
    )
    plan = replace(plan_of_sites(site_plan("q+k+v"), site_plan("b", fp8=False)), mods=mods)
    assert "; 1 of 2 sites (4 before merge_siblings) in FP8, " in verdict(plan)
    kept = replace(plan_of_sites(site_plan("q+k+v", fp8=False)), mods=mods)
    assert verdict(kept).endswith("nothing in FP8, of 1 site (3 before merge_siblings)")


def test_what_the_host_takes_decides_with_the_gpu() -> None:
    site = site_plan("a", us=10.0, without_fp8_us=15.0, as_is_us=20.0)
    assert site.timing is not None
    times = {name: replace(getattr(site.timing, name), host_us=12.0) for name in ("chosen", "without_fp8", "as_is")}
    site = replace(site, timing=replace(site.timing, **times))
    plan = replace(plan_of_sites(site), execution=ExecutionSpec(Execution.COMPILED, 0.0, 0.0))
    assert rows(plan) == [
        ("us of the GPU", "20.0", "15.0", "10.0"),
        ("us of the host", "12.0", "12.0", "12.0"),
        ("speed-up", "1.00x", "1.33x", "1.67x"),
    ]
    assert "1.67x over compiled BF16 is predicted, of which fusing gains 1.33x and FP8 itself gains 1.25x" in (
        verdict(plan)
    )


@pytest.mark.parametrize(
    ("measurements", "words"),
    [(None, "no measurements for h100 ship or are named, so time decided nothing"), (("t", ""), "t has no times for ")],
)
def test_without_times_it_says_that_the_gain_is_not_known(measurements: tuple[str, str] | None, words: str) -> None:
    plan = replace(plan_of_sites(site_plan("a", us=None)), measurements=measurements)
    assert f": 1 of 1 sites in FP8, 100.0 % of the training GEMM FLOPs; {words}" in verdict(plan)


def test_a_measured_step_goes_before_a_prediction() -> None:
    tuned = TunedStep(
        "p.tuned.json", "0" * 64, "all", 3.0, 4.0, None, None, False, "compiled", "NVIDIA H100", "2026-11-23"
    )
    assert (
        ": confirmed by a measured step: 3 ms against 4 ms of BF16 (compiled) on NVIDIA H100, 2026-11-23 (p.tuned."
        in (verdict(replace(plan_of_sites(site_plan("a")), tuned=tuned)))
    )
