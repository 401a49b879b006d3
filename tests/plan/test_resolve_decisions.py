"""Each way a GEMM can be decided, and the reason that it carries."""

from __future__ import annotations

import pytest

from loka.devices.targets import TargetDevice
from loka.errors import InputError
from loka.numerics.enums import Accumulation, Compute, Format, Gemm, Scaling
from loka.numerics.recipe import OperandRecipe
from loka.plan.decide import Situation
from loka.plan.evidence import NO_EVIDENCE
from loka.plan.plan import NATIVE, GemmPlan, SitePlan
from loka.plan.resolve import resolve
from loka.policy.settings import SiteSettings
from loka.sites.site import Site

HOPPER = Situation(TargetDevice.H100, 4096, {"p.yaml": "policies/p.yaml"})


def decide(site: Site, settings: SiteSettings, situation: Situation = HOPPER, refused: str | None = None) -> SitePlan:
    return resolve([site], [settings], situation, {site.name: refused} if refused else {})[0]


def gemm_of(plan: SitePlan, gemm: Gemm) -> GemmPlan:
    return next(each for each in plan.gemms if each.gemm is gemm)


def test_fp8_takes_the_kernel_with_the_recipe_and_says_who_asked(make_site, make_settings):
    settings = make_settings(Compute.FP8)
    plan = decide(make_site(), settings)
    assert [gemm.gemm for gemm in plan.gemms] == [Gemm.FPROP, Gemm.DGRAD, Gemm.WGRAD]
    for gemm in plan.gemms:
        assert gemm.kernel == "torch.scaled_mm"
        assert gemm.operands == settings.gemms[gemm.gemm].operands
        assert gemm.accumulation is Accumulation.PRECISE
        assert gemm.reason == "fp8 by p.yaml:14"


def test_keep_stays_and_says_who_asked(make_site, make_settings):
    plan = decide(make_site(), make_settings(Compute.KEEP))
    assert {(gemm.kernel, gemm.operands, gemm.reason) for gemm in plan.gemms} == {(NATIVE, None, "keep by p.yaml:14")}


def test_auto_without_evidence_stays_and_names_the_kernel_that_waits(make_site, make_settings):
    plan = decide(make_site(), make_settings(Compute.AUTO))
    for gemm in plan.gemms:
        assert not gemm.fp8
        assert gemm.reason == NO_EVIDENCE
        assert [(each.kernel, each.reason) for each in gemm.rejected] == [("torch.scaled_mm", NO_EVIDENCE)]


def test_auto_that_no_kernel_could_run_gives_that_reason_instead(make_site, make_settings):
    e5m2 = make_settings(Compute.AUTO, recipe=OperandRecipe(format=Format.E5M2))
    assert "e5m2 x e5m2" in gemm_of(decide(make_site(), e5m2), Gemm.FPROP).reason


def test_one_gemm_alone_can_be_fp8(make_site, make_settings):
    plan = decide(make_site(), make_settings(Compute.KEEP, fprop=Compute.FP8))
    assert [gemm.fp8 for gemm in plan.gemms] == [True, False, False]


def test_an_input_without_gradient_has_no_dgrad(make_site, make_settings):
    plan = decide(make_site(input_grad=False), make_settings())
    assert [gemm.gemm for gemm in plan.gemms] == [Gemm.FPROP, Gemm.WGRAD]


def test_a_blocked_site_under_a_broad_rule_stays_with_the_reason(make_site, make_settings):
    plan = decide(make_site(blocked="its forward is never called"), make_settings())
    for gemm in plan.gemms:
        assert not gemm.fp8
        assert gemm.reason == "its forward is never called"
        assert [each.kernel for each in gemm.rejected] == ["torch.scaled_mm"]


def test_a_blocked_site_says_so_though_a_rule_keeps_it(make_site, make_settings):
    settings = make_settings(Compute.KEEP, wgrad=Compute.AUTO)
    plan = decide(make_site(blocked="its weight is computed"), settings)
    assert [gemm.reason for gemm in plan.gemms] == ["its weight is computed"] * 3
    kept = decide(make_site(), settings, refused="a branch at models.py:4")  # nothing that the site itself is
    assert [gemm.reason for gemm in kept.gemms] == ["keep by p.yaml:14"] * 2 + ["a branch at models.py:4"]


def test_a_site_of_a_refused_owner_stays_with_that_reason(make_site, make_settings):
    plan = decide(make_site(), make_settings(), refused="branch on tensor size at models.py:44")
    assert {gemm.reason for gemm in plan.gemms} == {"branch on tensor size at models.py:44"}


@pytest.mark.parametrize("why", ["blocked", "refused", "recipe"])
def test_a_rule_for_one_site_that_cannot_is_an_error_with_its_place(why, make_site, make_settings):
    recipe = OperandRecipe(format=Format.E5M2) if why == "recipe" else None
    site = make_site(blocked="generated weights" if why == "blocked" else None)
    settings = make_settings(names_one_site=True, recipe=recipe)
    with pytest.raises(InputError) as caught:
        decide(site, settings, refused="a branch" if why == "refused" else None)
    message = str(caught.value)
    assert all(line.startswith("policies/p.yaml:14: rule 1: x asks for ") for line in message.splitlines())
    assert "'layers.0.fmb.0'" in message
    assert "compute: keep" in message
    assert caught.value.exit_status == 2


def test_a_rule_for_one_site_that_can_is_no_error(make_site, make_settings):
    assert decide(make_site(), make_settings(names_one_site=True)).fp8


def test_the_reference_target_takes_recipes_that_hopper_does_not(make_site, make_settings):
    settings = make_settings(recipe=OperandRecipe(format=Format.E5M2, scaling=Scaling.TENSORWISE))
    assert not decide(make_site(), settings).fp8
    assert decide(make_site(), settings, Situation(TargetDevice.REFERENCE, 4096)).fp8


def test_sites_that_differ_in_what_decides_do_not_share(make_site, make_settings):
    settings = make_settings()
    sites = [make_site("a"), make_site("b", input_grad=False), make_site("c", blocked="no"), make_site("d", k=100)]
    plans = resolve(sites, [settings] * 4, HOPPER, {})
    assert [len(plan.gemms) for plan in plans] == [3, 2, 3, 3]
    assert [plan.fp8 for plan in plans] == [True, True, False, True]
