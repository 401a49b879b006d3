"""What a profile decides: `auto`, forced sites over budget, static ranges, and the words for each."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf

import pytest

from loka.numerics.enums import Compute, Gemm, Operand, Range, Scaling
from loka.numerics.recipe import OperandRecipe
from loka.plan.decide import Situation
from loka.plan.evidence import NEVER_RAN, over_budget, over_budget_message
from loka.plan.plan import NATIVE, GemmPlan
from loka.plan.resolve import ImpossibleRuleError, resolve
from loka.policy.settings import Budget
from loka.probe.profile.profile import Interval, Verdict

NAME = "layers.0.fmb.0"


@pytest.fixture
def decide(make_site, make_settings, make_known):
    """The decision for each GEMM of one site with some estimates."""

    def make(*estimates, settings=None, known=None, **changes) -> dict[Gemm, GemmPlan]:
        situation = Situation("h100", 4096, known=known or make_known({NAME: estimates}))
        wanted = settings or make_settings(Compute.AUTO)
        (plan,) = resolve([make_site(**changes)], [wanted], situation, {})
        return {gemm.gemm: gemm for gemm in plan.gemms}

    return make


def test_auto_is_fp8_for_exactly_the_gemms_that_are_safe(decide, make_estimate):
    found = decide(make_estimate(Gemm.FPROP), make_estimate(Gemm.DGRAD, mere=0.4), make_estimate(Gemm.WGRAD))
    assert {gemm: each.fp8 for gemm, each in found.items()} == {Gemm.FPROP: True, Gemm.DGRAD: False, Gemm.WGRAD: True}
    assert found[Gemm.FPROP].reason == "safe by evidence, auto by p.yaml:14"
    assert found[Gemm.FPROP].kernel == "torch.scaled_mm"
    evidence = found[Gemm.FPROP].evidence
    assert (evidence.verdict, evidence.steps, evidence.samples, evidence.draws) == (Verdict.SAFE, 4000, 40, 16)
    assert evidence.mere == Interval(0.02, 0.01, 0.03)
    assert evidence.figures == ""


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ({"mere": 0.26}, "unsafe: MERE 0.26 [0.25, 0.27] over the budget 0.2"),
        ({"sqnr": 20.0}, "unsafe: SQNR 20.0 dB [19.5, 20.5] under the budget 24"),
        (
            {"mere": 0.26, "sqnr": 20.0},
            "unsafe: MERE 0.26 [0.25, 0.27] over the budget 0.2 and SQNR 20.0 dB [19.5, 20.5] under the budget 24",
        ),
        ({"sqnr": 24.1, "sqnr_by": 0.7}, "undecided: SQNR 24.1 dB [23.4, 24.8] about the budget 24"),
        ({"mere": 0.2}, "undecided: MERE 0.2 [0.19, 0.21] about the budget 0.2"),
        ({"mere": inf, "mere_by": 0.0}, "unsafe: MERE inf [inf, inf] over the budget 0.2"),
    ],
)
def test_auto_that_is_not_safe_is_kept_with_the_figures(figures, reason, decide, make_estimate):
    kept = decide(make_estimate(Gemm.FPROP, **figures))[Gemm.FPROP]
    assert (kept.kernel, kept.operands, kept.reason) == (NATIVE, None, reason)
    assert [(each.kernel, each.reason) for each in kept.rejected] == [("torch.scaled_mm", reason)]
    assert kept.evidence.verdict.value == reason.partition(":")[0]


def test_the_budget_is_that_of_the_site(decide, make_estimate, make_settings):
    strict = replace(make_settings(Compute.AUTO), budget=Budget(mere=0.01, sqnr_db=24))
    assert decide(make_estimate())[Gemm.FPROP].fp8
    assert not decide(make_estimate(), settings=strict)[Gemm.FPROP].fp8
    loose = replace(make_settings(Compute.AUTO), budget=Budget(mere=0.5, sqnr_db=10))
    assert decide(make_estimate(mere=0.4), settings=loose)[Gemm.FPROP].fp8


STATIC = OperandRecipe(range=Range.STATIC)
FORWARD = (Operand.INPUT, Operand.WEIGHT)
NO_SITE = "no evidence for this site in profiles/ranker.safetensors: run loka probe"
NO_INPUT = "range: static: input was never seen while probing; give amax"


@pytest.mark.parametrize(
    ("asked", "seen", "gemm", "reason"),
    [
        # only an estimate of the very recipe counts
        ({"recipe": OperandRecipe(scaling=Scaling.TENSORWISE)}, {}, Gemm.FPROP, "no evidence for e4m3 tensorwise: "),
        ({"recipe": OperandRecipe(power_of_two=True)}, {}, Gemm.FPROP, "no evidence for e4m3 rowwise pow2: "),
        ({}, {"seen": ()}, Gemm.FPROP, NEVER_RAN),
        ({}, {"seen": (Operand.WEIGHT,)}, Gemm.FPROP, NEVER_RAN),
        ({}, {"seen": FORWARD}, Gemm.FPROP, "safe by evidence, "),
        ({}, {"seen": FORWARD}, Gemm.WGRAD, "no evidence: grad_output was never seen while probing"),
        ({}, {"name": "another"}, Gemm.FPROP, NO_SITE),
        ({"compute": Compute.FP8, "recipe": STATIC}, {"seen": (Operand.WEIGHT,)}, Gemm.FPROP, NO_INPUT),
        ({"compute": Compute.FP8, "recipe": STATIC}, {"amax": 0.0}, Gemm.FPROP, "range: static: .*nothing but zeros"),
        ({"recipe": STATIC}, {}, Gemm.FPROP, "no evidence for e4m3 rowwise static"),  # that of a dynamic range is none
    ],
)
def test_what_a_profile_lacks_is_the_reason(
    asked, seen, gemm, reason, decide, make_settings, make_known, make_estimate
):
    changes = {**seen}
    name = changes.pop("name", NAME)
    estimates = (make_estimate(),) if Operand.INPUT in seen.get("seen", Operand) else ()
    settings = make_settings(**{"compute": Compute.AUTO, **asked})
    found = decide(settings=settings, known=make_known({name: estimates}, **changes))[gemm]
    assert re.match(reason, found.reason)
    assert found.fp8 is reason.startswith("safe")


def test_keep_is_kept_and_still_shows_what_fp8_would_cost(decide, make_estimate, make_settings):
    kept = decide(make_estimate(), settings=make_settings(Compute.KEEP))[Gemm.FPROP]
    assert (kept.fp8, kept.reason, kept.over_budget) == (False, "keep by p.yaml:14", False)
    assert kept.evidence.mere.mean == 0.02


def test_forced_stays_fp8_and_is_marked_where_the_evidence_is_against_it(
    decide, make_estimate, make_settings, make_plan, make_site, make_known
):
    estimates = (make_estimate(mere=0.26), make_estimate(Gemm.DGRAD, mere=0.2), make_estimate(Gemm.WGRAD))
    found = decide(*estimates, settings=make_settings(Compute.FP8))
    assert all(each.fp8 for each in found.values())
    assert [each.over_budget for each in found.values()] == [True, False, False]  # undecided is not over
    figures = "MERE 0.26 [0.25, 0.27] over the budget 0.2"
    assert found[Gemm.FPROP].reason == f"fp8 by p.yaml:14, over budget: {figures}"
    plan = make_plan(make_site(), known=make_known({NAME: estimates}))
    assert over_budget(plan) == (f"{NAME} fprop: {figures}",)
    assert over_budget_message(plan).startswith("1 GEMM is over budget by profiles/ranker.safetensors")
    assert over_budget_message(make_plan(make_site())) == ""


def test_a_message_over_many_sites_names_some_and_counts_the_rest(make_plan, make_site, make_known, make_estimate):
    sites = [make_site(f"a.{i}") for i in range(50)]
    plan = make_plan(*sites, known=make_known({site.name: (make_estimate(mere=0.3),) for site in sites}))
    lines = over_budget_message(plan).splitlines()
    assert len(over_budget(plan)) == 50
    assert len(lines) == 23
    assert lines[0].startswith("50 GEMMs are")
    assert lines[-2] == "  and 30 more"


@pytest.mark.parametrize("recipe", [STATIC, replace(STATIC, amax=3.5)], ids=["asked", "filled"])
def test_a_static_range_is_the_largest_value_seen_and_needs_its_own_estimate(
    recipe, decide, make_estimate, make_settings
):
    settings = make_settings(Compute.AUTO, recipe=STATIC)
    found = decide(make_estimate(recipe=recipe), settings=settings)[Gemm.FPROP]
    assert found.operands == (replace(STATIC, amax=3.5),) * 2
    given = make_settings(Compute.FP8, recipe=replace(STATIC, amax=2.0))
    assert decide(settings=given)[Gemm.FPROP].operands[0].amax == 2.0


def test_a_static_range_of_what_was_not_seen_is_an_error_for_one_site(decide, make_known, make_settings):
    unseen = make_known({NAME: ()}, seen=(Operand.WEIGHT,))
    with pytest.raises(ImpossibleRuleError, match="input was never seen"):
        decide(settings=make_settings(Compute.FP8, recipe=STATIC, names_one_site=True), known=unseen)
