"""Kernels that a policy names: the only candidate, kept with the reason where it cannot, an error for one site."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loka.devices.targets import TargetDevice
from loka.errors import InputError
from loka.kernels.gemm.catalogue import SCALED_MM, kernel_named
from loka.numerics.enums import Compute, Format, Gemm, Scaling
from loka.numerics.recipe import OperandRecipe
from loka.plan.decide import Situation, accepted_operands
from loka.plan.evidence import NO_EVIDENCE
from loka.plan.plan import NATIVE, SitePlan
from loka.plan.resolve import resolve
from loka.plan.select.workload import SiteSizes
from loka.policy.settings import Assignment, GemmSettings, SiteSettings
from loka.sites.site import Site
from tests.support.plan.plan_costs import MadeUp

HOPPER = Situation(TargetDevice.H100, 4096, {"p.yaml": "policies/p.yaml"})
TENSORWISE = OperandRecipe(scaling=Scaling.TENSORWISE)
TRANSPOSED = OperandRecipe(scaling=Scaling.TENSORWISE, power_of_two=True, transposed=True)


def pinned(settings: SiteSettings, kernel: str, one_site: bool = False, *gemms: Gemm) -> SiteSettings:
    """The settings with a kernel for some GEMMs, or for all, by a rule."""
    chosen = gemms or tuple(Gemm)
    paths = {f"{gemm.value}.kernel" for gemm in chosen}
    history = {path: (Assignment(path, kernel, "rule 2: y", "p.yaml", 20, one_site),) for path in paths}
    changed = {gemm: replace(settings.gemms[gemm], kernel=kernel) for gemm in chosen}
    return replace(settings, gemms={**settings.gemms, **changed}, history={**settings.history, **history})


def decide(site: Site, settings: SiteSettings, situation: Situation = HOPPER) -> SitePlan:
    return resolve([site], [settings], situation, {})[0]


def test_the_named_kernel_runs_and_no_other_is_asked(make_site, make_settings):
    plan = decide(make_site(), pinned(make_settings(), "fbgemm.rowwise", False, Gemm.DGRAD))
    assert [gemm.kernel for gemm in plan.gemms] == ["torch.scaled_mm", "fbgemm.rowwise", "torch.scaled_mm"]
    assert plan.gemms[1].rejected == ()
    assert plan.gemms[1].reason == "fp8 by p.yaml:14"


def test_what_it_cannot_run_stays_with_its_reason(make_site, make_settings):
    plan = decide(make_site(), pinned(make_settings(recipe=TENSORWISE), "fbgemm.rowwise"))
    for gemm in plan.gemms:
        assert (gemm.kernel, gemm.fp8) == (NATIVE, False)
        assert gemm.reason == "FBGEMM GenAI multiplies rowwise x rowwise, not tensorwise x tensorwise"
        assert [each.kernel for each in gemm.rejected] == ["fbgemm.rowwise"]


@pytest.mark.parametrize("compute", [Compute.FP8, Compute.AUTO])
def test_a_rule_for_one_site_that_names_it_is_an_error(compute, make_site, make_settings):
    settings = pinned(make_settings(compute, recipe=TENSORWISE), "mslk.rowwise", True)
    with pytest.raises(InputError) as caught:
        decide(make_site(), settings)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "policies/p.yaml:20: rule 2: y wants fprop of 'layers.0.fmb.0' on mslk.rowwise, which cannot be: MSLK "
        "multiplies rowwise x rowwise, not tensorwise x tensorwise; write another kernel there, or leave it out"
    )
    assert len(lines) == 3


def test_a_rule_that_asks_for_fp8_too_is_told_once_what_to_do(make_site, make_settings):
    settings = pinned(make_settings(names_one_site=True, recipe=TENSORWISE), "mslk.rowwise", True)
    with pytest.raises(InputError) as caught:
        decide(make_site(), settings)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert all("mslk.rowwise, which cannot be: " in line for line in lines)


def test_a_gemm_that_is_kept_or_waits_for_evidence_is_no_error(make_site, make_settings):
    kept = pinned(make_settings(Compute.KEEP, recipe=TENSORWISE), "mslk.rowwise", True)
    assert not decide(make_site(), kept).fp8
    waiting = decide(make_site(), pinned(make_settings(Compute.AUTO), "mslk.rowwise", True))
    assert [(gemm.reason, [each.kernel for each in gemm.rejected]) for gemm in waiting.gemms] == [
        (NO_EVIDENCE, ["mslk.rowwise"])
    ] * 3


def test_an_unknown_kernel_is_an_error_with_its_place_once(make_site, make_settings):
    settings = pinned(make_settings(), "torch.scaled_nn")
    with pytest.raises(InputError) as caught:
        resolve([make_site("a"), make_site("b")], [settings, settings], HOPPER, {})
    assert (
        str(caught.value) == "policies/p.yaml:20: there is no kernel 'torch.scaled_nn'; did you mean 'torch.scaled_mm'?"
    )


def test_auto_after_a_kernel_takes_it_back(make_site, make_settings):
    settings = pinned(make_settings(recipe=TENSORWISE), "auto", True)
    assert [gemm.kernel for gemm in decide(make_site(), settings).gemms] == ["torch.scaled_mm"] * 3


def test_transposed_operands_are_taken_in_the_form_that_a_kernel_takes():
    asked = GemmSettings(Compute.FP8, (TRANSPOSED, TRANSPOSED))
    sizes = SiteSizes(4096, 512, 256)
    assert accepted_operands(SCALED_MM, Gemm.WGRAD, asked, sizes, "h100") == (TRANSPOSED, TRANSPOSED)
    rows = replace(TRANSPOSED, scaling=Scaling.ROWWISE)
    assert accepted_operands(kernel_named("fbgemm.rowwise"), Gemm.WGRAD, asked, sizes, "h100") == (rows, rows)
    e5m2 = replace(asked, operands=(TRANSPOSED, replace(TRANSPOSED, format=Format.E5M2)))
    assert accepted_operands(kernel_named("fbgemm.rowwise"), Gemm.WGRAD, e5m2, sizes, "h100") == e5m2.operands
    plain = replace(asked, operands=(TENSORWISE, TENSORWISE))
    assert accepted_operands(kernel_named("fbgemm.rowwise"), Gemm.WGRAD, plain, sizes, "h100") == plain.operands


@pytest.mark.parametrize("measured", [False, True])
def test_measurements_do_not_move_a_gemm_off_the_named_kernel(measured, make_site, make_settings):
    kernels = {"torch.scaled_mm": 0.5, "as-is": 1.0} | ({"fbgemm.rowwise": 0.9} if measured else {})
    situation = replace(HOPPER, costs=MadeUp(kernels=kernels))
    plan = decide(make_site(), pinned(make_settings(), "fbgemm.rowwise", False, Gemm.FPROP), situation)
    assert [gemm.kernel for gemm in plan.gemms] == ["fbgemm.rowwise", "torch.scaled_mm", "torch.scaled_mm"]
    assert "torch.scaled_mm" not in [each.kernel for each in plan.gemms[0].rejected]
