"""The values of a page: headlines, legend and sources."""

from __future__ import annotations

from dataclasses import replace

from loka.bench.report.loss_curves import KeptRuns
from loka.bench.report.measured_steps import measured_steps
from loka.bench.report.page import ROWS, Headline, Origin, Report, Tone, gather
from loka.devices.spec import Execution
from loka.plan.evidence import ProfiledSites
from loka.plan.plan import Plan
from loka.plan.planner import Planned
from loka.policy.policy import ExecutionSpec
from loka.probe.profile.profile import Verdict
from tests.support.markdown import REPOSITORY
from tests.support.plan.report_plans import interaction, plan_of_sites, site_plan
from tests.support.plan.shop_profile import profile_of

NONE = KeptRuns((), ())
FUSED = (interaction("head"),)
PLAN = plan_of_sites(site_plan("dense", share=0.6), site_plan("head", fp8=False, share=0.4), interactions=FUSED)
KNOWN = ProfiledSites.of(profile_of({}), "profiles/shop.safetensors", "ef" * 32)


def report(plan: Plan = PLAN, known: ProfiledSites | None = KNOWN) -> Report:
    return gather(Planned(plan, known), "policies/shop.yaml", NONE)


def headline(found: Report, label: str) -> Headline:
    return next(each for each in found.headlines if each.label.startswith(label))


def test_errors_say_what_is_wrong() -> None:
    over = plan_of_sites(site_plan("a", verdict=Verdict.UNSAFE), site_plan("b", mere=None), site_plan("c"))
    found = headline(report(over), "GEMMs in FP8")
    assert (found.value, found.note, found.tone) == (
        "3 of 9",
        "3 over budget, 3 without evidence in the profile (loka probe)",
        Tone.BAD,
    )
    assert headline(report(plan_of_sites(site_plan("a", mere=None)), None), "GEMMs in FP8").value == "no evidence"
    assert headline(report(plan_of_sites(site_plan("a", fp8=False))), "GEMMs in FP8").value == "none"


def test_fp8_gets_no_credit_for_what_fusing_gains() -> None:
    slowed = plan_of_sites(*(site_plan(each.site.name, without_fp8_us=8.0) for each in PLAN.sites), interactions=FUSED)
    found = report(slowed)
    alone = headline(found, "of which FP8 itself")
    assert (alone.value, alone.tone) == ("0.84x", Tone.BAD)
    assert alone.note == "predicted; without FP8, LoKA is 4.29x"
    named = headline(found, "sites that FP8 slows")
    assert (named.value, named.tone) == ("2", Tone.BAD)
    assert named.note == "predicted: dense, head"
    assert found.times is not None
    assert [bar.slowed for bar in found.times.bars] == [False, True, True]  # the interaction first
    assert "8.0 us without FP8, 20.0 us in compiled BF16, 2.00x, which FP8 slows" in found.times.bars[-1].words
    assert not any(each.label.startswith("sites that") for each in report().headlines)
    bare = plan_of_sites(*(site_plan(each.site.name, fp8=False) for each in PLAN.sites))
    assert not any(each.label.startswith("of which") for each in report(bare).headlines)


def test_the_speed_is_that_of_a_whole_step_where_the_policy_says_how_it_runs() -> None:
    def with_host(site):
        timing = site.timing
        chosen, bare, as_is = (
            replace(each, host_us=100.0) for each in (timing.chosen, timing.without_fp8, timing.as_is)
        )
        return replace(site, timing=replace(timing, chosen=chosen, without_fp8=bare, as_is=as_is))

    plan = replace(PLAN, sites=tuple(map(with_host, PLAN.sites)), execution=ExecutionSpec(Execution.COMPILED, 1.0, 0.5))
    found = headline(report(plan), "predicted speed-up in a loop")
    assert (found.value, found.tone) == ("1.00x", Tone.PLAIN)
    assert found.note.endswith("it waits for the host")
    assert [each.what for each in report(plan).sources if "host" in each.what] == ["time of the host"]


def test_a_measured_step_is_the_headline() -> None:
    steps = measured_steps(
        REPOSITORY / "docs" / "results" / "model-wukong_small-2026-11-23.json",
        replace(PLAN, name="wukong_small", batch_size=16384),
    )
    found = gather(Planned(PLAN, None), "shop.yaml", NONE, steps)
    assert headline(found, "measured speed-up").value == "1.73x"
    assert (found.sources[-1].what, found.sources[-1].origin) == ("whole training steps", Origin.MEASURED)


def test_without_times_and_for_the_reference_path() -> None:
    plan = replace(plan_of_sites(site_plan("a", us=None)), target="reference", measurements=None)
    found = report(plan)
    assert headline(found, "predicted speed-up").value == "not known"
    assert headline(found, "target").value == "reference"
    assert (found.times, found.step, found.step_sentences) == (None, None, ())


def test_a_change_of_ne_beyond_the_budget_is_bad() -> None:
    site = site_plan("a")
    gemms = tuple(replace(gemm, evidence=replace(gemm.evidence, ne_percent=gemm.evidence.mere)) for gemm in site.gemms)
    plan = replace(plan_of_sites(replace(site, gemms=gemms)), ne_budget=0.2)
    found = headline(report(plan), "change of NE")
    assert (found.value, found.tone) == ("+0.3 %", Tone.BAD)
    assert found.note == "predicted over 3 GEMMs, 95 % interval +0.27 to +0.33 %; budget 0.2 %"
    assert headline(report(replace(plan, ne_budget=None)), "change of NE").tone is Tone.PLAIN


def test_long_tables_are_cut() -> None:
    sites = (site_plan(f"tower.x{i}") for i in range(ROWS + 5))
    found = report(plan_of_sites(*sites))
    assert found.evidence is not None
    assert (len(found.decisions[1]), len(found.evidence[1]), found.rows_left_out) == (ROWS, ROWS, 5)
    assert report().rows_left_out == 0
