"""The predicted change of NE of a plan: shown where the profile has it, and kept within the policy's budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loka.numerics.enums import Compute, Gemm
from loka.numerics.recipe import OperandRecipe
from loka.plan.decide import Situation
from loka.plan.evidence import ProfiledSites, over_budget_message, with_merged_sites
from loka.plan.ne import planned_ne
from loka.plan.resolve import resolve
from loka.plan.view.explain import explain
from loka.probe.profile.profile import Interval, NeEstimate

RECIPE = (OperandRecipe(), OperandRecipe())
CHANGES = {"embed": 0.005, "body": 0.004, "head": 0.003}
SHARES = {"embed": 0.01, "body": 0.8, "head": 0.19}


def change_of(mean: float) -> NeEstimate:
    return NeEstimate(Gemm.FPROP, RECIPE, Interval(mean, 0.9 * mean, 1.1 * mean), 0.01, 0.002)


@pytest.fixture
def known_with(make_known, make_estimate):
    """A profile in which each GEMM of these sites is safe by MERE, with changes of NE by their forward GEMMs."""

    def make(changes: dict[str, float | None]) -> ProfiledSites:
        estimates = tuple(make_estimate(gemm) for gemm in Gemm)
        profile = make_known(dict.fromkeys(changes, estimates)).profile
        measured = [
            site if changes[site.name] is None else replace(site, ne=(change_of(changes[site.name]),))
            for site in profile.sites
        ]
        return ProfiledSites.of(replace(profile, sites=tuple(measured)), "profiles/ranker.safetensors", "b" * 64)

    return make


@pytest.fixture
def decided(make_site, make_settings, known_with):
    """The sites of CHANGES as decided under a budget, all with the same `compute` or each with its own."""

    def make(budget: float | None, compute=Compute.AUTO, known=None, **each: Compute):
        sites = [make_site(name, share=share) for name, share in SHARES.items()]
        settings = [make_settings(each.get(name, compute)) for name in SHARES]
        situation = Situation("h100", 4096, known=known or known_with(CHANGES), ne_budget=budget)
        return {plan.site.name: plan for plan in resolve(sites, settings, situation, {})}

    return make


def forward(plans) -> set[str]:
    return {name for name, plan in plans.items() if plan.gemms[0].fp8}


def test_without_a_budget_changes_of_ne_decide_nothing(decided, known_with):
    with_changes, without = decided(None), decided(None, known=known_with(dict.fromkeys(CHANGES)))
    assert forward(with_changes) == set(CHANGES)
    for name, plan in with_changes.items():
        bare = tuple(replace(gemm, evidence=replace(gemm.evidence, ne_percent=None)) for gemm in plan.gemms)
        assert bare == without[name].gemms


def test_the_plan_has_the_sum_of_its_sites_with_their_ends(decided):
    found = planned_ne(decided(None).values())
    assert found.ne_percent.mean == pytest.approx(0.012)
    assert found.ne_percent.low == pytest.approx(0.0108)
    assert found.ne_percent.high == pytest.approx(0.0132)
    assert (found.known, found.unknown) == (3, ())


@pytest.mark.parametrize(
    ("budget", "runs"),
    [(0.0133, {"embed", "body", "head"}), (0.0131, {"body", "head"}), (0.0076, {"body"}), (0.0043, set())],
)
def test_sites_that_lose_most_for_their_flops_are_kept_until_the_upper_ends_fit(budget, runs, decided):
    plans = decided(budget)
    assert forward(plans) == runs
    for name in set(CHANGES) - runs:
        assert plans[name].gemms[0].reason.startswith("kept: with its change of NE, +0.00")
        assert f"the plan would be over the budget {budget:g} %" in plans[name].gemms[0].reason
        assert plans[name].gemms[2].fp8  # its backward was not measured, and costs nothing that is known


def test_forced_sites_stay_and_the_plan_says_over_budget(decided, make_plan):
    plans = decided(0.006, embed=Compute.FP8)
    assert forward(plans) == {"embed"}
    assert over_budget_message(make_plan(sites=tuple(plans.values()), ne_budget=0.006)) == ""
    forced = make_plan(sites=tuple(decided(0.006, Compute.FP8).values()), ne_budget=0.006)
    message = over_budget_message(forced)
    assert "a change of NE of +0.012 % [0.0108, 0.0132], and budget.ne_percent is 0.006" in message
    assert over_budget_message(replace(forced, ne_budget=0.0133)) == ""


def test_with_a_budget_a_forward_gemm_needs_evidence_of_ne(decided, known_with):
    plans = decided(1.0, known=known_with({**CHANGES, "head": None}))
    assert forward(plans) == {"embed", "body"}
    assert plans["head"].gemms[0].reason == "no evidence for the change of NE: run loka probe"
    assert forward(decided(None, known=known_with({**CHANGES, "head": None}))) == set(CHANGES)


def test_explain_shows_the_change_of_the_recipe_that_runs(make_plan, make_site, known_with):
    known = known_with({"body": 0.004})
    found = explain(make_plan(make_site("body"), known=known), "body", known)
    (ran,) = [each for each in found.evidence.recipes if each.gemm is Gemm.FPROP and each.runs]
    assert ran.ne == change_of(0.004)


def test_a_merged_site_has_the_sum_of_its_members(make_site, known_with):
    merged = make_site("merged", members=("body", "head"), n=2048)
    known = with_merged_sites(known_with(CHANGES), [merged])
    (found,) = known.sites["merged"].ne
    assert found.ne_percent.mean == pytest.approx(0.007)
    assert found.ne_percent.high == pytest.approx(1.1 * 0.007)
    lacking = with_merged_sites(known_with({"body": 0.004, "head": None}), [merged])
    assert lacking.sites["merged"].ne == ()
