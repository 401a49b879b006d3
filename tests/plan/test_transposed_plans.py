"""Transposed operands in a plan: when they can be, why not, their words, and plan.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from loka.devices.targets import TargetDevice
from loka.numerics.enums import Compute, Format, Gemm, Operand, Range, Scaling
from loka.numerics.recipe import OperandRecipe
from loka.plan.decide import Situation
from loka.plan.format import format_gemm
from loka.plan.plan import NATIVE, GemmPlan
from loka.plan.resolve import resolve
from loka.plan.view.diff import diff
from loka.plan.view.explain import explain
from loka.policy.settings import GemmSettings, SiteSettings
from loka.probe.estimate import candidates
from loka.probe.profile.profile import Estimate, Interval

PAIRS = {gemm: candidates(gemm)[-1] for gemm in Gemm}  # rowwise powers of two, and what is transposed from them
ROWS = PAIRS[Gemm.FPROP][0]
NAME = "layers.0.fmb.0"

Decide = Callable[..., dict[Gemm, GemmPlan]]


@pytest.fixture
def transposed_settings(make_settings) -> Callable[..., SiteSettings]:
    """Settings of the standard transposed recipes, with some GEMMs' recipes changed."""

    def make(compute: Compute = Compute.FP8, pairs: dict | None = None, **more: object) -> SiteSettings:
        settings = make_settings(compute, **more)
        wanted = {**PAIRS, **(pairs or {})}
        gemms = {gemm: GemmSettings(each.compute, wanted[gemm]) for gemm, each in settings.gemms.items()}
        return replace(settings, gemms=gemms)

    return make


@pytest.fixture
def decide(make_site) -> Decide:
    def one(settings: SiteSettings, known=None, target: TargetDevice = TargetDevice.H100, **changes: object) -> dict:
        situation = Situation(target, 4096, {"p.yaml": "policies/p.yaml"}, known=known)
        (plan,) = resolve([make_site(**changes)], [settings], situation, {})
        return {gemm.gemm: gemm for gemm in plan.gemms}

    return one


def estimate_of(gemm: Gemm, mere: float = 0.02) -> Estimate:
    return Estimate(gemm, PAIRS[gemm], Interval(mere, 0.9 * mere, 1.1 * mere), Interval(30, 29, 31), 16)


@pytest.mark.parametrize("target", list(TargetDevice))
def test_all_three_run_where_the_sources_do(decide: Decide, transposed_settings, target: TargetDevice) -> None:
    plan = decide(transposed_settings(), target=target)
    assert {gemm: each.operands for gemm, each in plan.items()} == PAIRS
    assert {each.reason for each in plan.values()} == {"fp8 by p.yaml:14"}


def test_what_stays_as_it_is_is_no_source(decide: Decide, transposed_settings) -> None:
    plan = decide(transposed_settings(fprop=Compute.KEEP))
    for gemm, operand in ((Gemm.DGRAD, "weight"), (Gemm.WGRAD, "input")):
        reason = f"{operand} is to be transposed from fprop's, which stays as it is"
        assert (plan[gemm].kernel, plan[gemm].operands, plan[gemm].reason) == (NATIVE, None, reason)
        assert [(each.kernel, each.reason) for each in plan[gemm].rejected] == [("torch.scaled_mm", reason)]


def test_one_that_is_refused_takes_along_what_is_transposed_from_it(decide: Decide, transposed_settings) -> None:
    plan = decide(transposed_settings(pairs={Gemm.FPROP: (ROWS, replace(ROWS, power_of_two=False))}))
    assert plan[Gemm.FPROP].fp8
    assert plan[Gemm.DGRAD].reason == (
        "weight is to be transposed from fprop's, which is e4m3 rowwise; give fprop scaling: rowwise, range: dynamic "
        "and power_of_two: true"
    )
    assert plan[Gemm.WGRAD].reason == "grad_output is to be transposed from dgrad's, which stays as it is"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (OperandRecipe(scaling=Scaling.TENSORWISE, power_of_two=True), "e4m3 tensorwise pow2"),
        (OperandRecipe(range=Range.STATIC, amax=2.0, power_of_two=True), "e4m3 rowwise static(2) pow2"),
        (OperandRecipe(scaling=Scaling.BLOCKWISE_1X128, power_of_two=True), "e4m3 blockwise_1x128 pow2"),
    ],
)
def test_a_source_in_another_form_is_named(
    source: OperandRecipe, words: str, decide: Decide, transposed_settings
) -> None:
    plan = decide(transposed_settings(pairs={Gemm.FPROP: (source, source)}))
    assert plan[Gemm.WGRAD].reason.startswith(f"input is to be transposed from fprop's, which is {words}; give fprop ")


def test_e5m2_can_be_transposed_too(decide: Decide, transposed_settings) -> None:
    e5m2 = {gemm: (replace(PAIRS[gemm][0], format=Format.E5M2), PAIRS[gemm][1]) for gemm in (Gemm.DGRAD, Gemm.WGRAD)}
    plan = decide(transposed_settings(pairs=e5m2))
    assert [each.fp8 for each in plan.values()] == [True, True, True]
    assert format_gemm(plan[Gemm.WGRAD]) == "grad_output e5m2 transposed, input e4m3 transposed"


def test_an_input_without_gradient_needs_no_dgrad_to_turn_from(decide: Decide, transposed_settings) -> None:
    plan = decide(transposed_settings(dgrad=Compute.KEEP), input_grad=False)
    assert {gemm: each.operands for gemm, each in plan.items()} == {
        gemm: PAIRS[gemm] for gemm in (Gemm.FPROP, Gemm.WGRAD)
    }
    kept = decide(transposed_settings(dgrad=Compute.KEEP))
    assert kept[Gemm.WGRAD].reason == "grad_output is to be transposed from dgrad's, which stays as it is"


def test_what_is_read_along_its_rows_has_nothing_to_be_transposed_from(decide: Decide, transposed_settings) -> None:
    plan = decide(transposed_settings(pairs={Gemm.FPROP: PAIRS[Gemm.WGRAD]}))
    assert plan[Gemm.FPROP].reason == "weight is read along its rows in fprop; there is nothing to transpose it from"


def test_auto_follows_the_evidence_of_the_transposed_recipe_and_of_its_sources(
    decide: Decide, transposed_settings, make_known
) -> None:
    good = {gemm: estimate_of(gemm) for gemm in Gemm}
    settings = transposed_settings(Compute.AUTO)
    plan = decide(settings, make_known({NAME: tuple(good.values())}))
    assert {each.reason for each in plan.values()} == {"safe by evidence, auto by p.yaml:14"}
    untried = decide(settings, make_known({NAME: (good[Gemm.FPROP], good[Gemm.DGRAD])}))
    assert untried[Gemm.WGRAD].reason == "no evidence for e4m3 transposed: run loka probe"
    unsafe = estimate_of(Gemm.FPROP, mere=0.5)
    kept = decide(settings, make_known({NAME: (unsafe, good[Gemm.DGRAD], good[Gemm.WGRAD])}))
    assert kept[Gemm.WGRAD].reason == "input is to be transposed from fprop's, which stays as it is"


def test_words_of_a_plan_and_of_what_changed(make_plan, make_site, make_settings, transposed_settings) -> None:
    after = make_plan(make_site(), settings=transposed_settings())
    assert [format_gemm(gemm) for gemm in after.sites[0].gemms] == [
        "e4m3 rowwise pow2",
        "grad_output e4m3 rowwise pow2, weight e4m3 transposed",
        "e4m3 transposed",
    ]
    assert format_gemm(explain(after, NAME).found.gemms[2]) == "e4m3 transposed"
    before = make_plan(make_site(), settings=make_settings(recipe=ROWS))
    changes = {change.gemm: (change.before, change.after) for change in diff(before, after).gemms}
    assert changes[Gemm.WGRAD] == ("e4m3 rowwise pow2", "e4m3 transposed")
    assert Gemm.FPROP not in changes


def test_a_plan_with_a_profile_that_has_no_such_operand_says_why(
    decide: Decide, transposed_settings, make_known
) -> None:
    forward = make_known({NAME: ()}, seen=(Operand.INPUT, Operand.WEIGHT))
    plan = decide(transposed_settings(Compute.FP8, dgrad=Compute.AUTO), forward)
    assert plan[Gemm.DGRAD].reason == "no evidence: grad_output was never seen while probing"
    assert plan[Gemm.WGRAD].reason == "grad_output is to be transposed from dgrad's, which stays as it is"
