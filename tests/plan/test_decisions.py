"""Each way a GEMM can be decided without times: by rules, recipes, named kernels, and what is transposed from what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loka.devices.spec import OCP
from loka.devices.targets import DEVICES
from loka.errors import Code, InputError
from loka.kernels.gemm.catalogue import kernel_named
from loka.numerics.enums import Accumulation, Compute, Format, Gemm, Operand, Range, Scaling
from loka.numerics.recipe import OperandRecipe
from loka.plan.decide import Situation, accepted_operands
from loka.plan.evidence import NO_EVIDENCE
from loka.plan.format import format_gemm
from loka.plan.plan import NATIVE
from loka.plan.resolve import resolve
from loka.plan.select.workload import SiteSizes
from loka.policy.settings import Assignment, GemmSettings, SiteSettings
from loka.probe.estimate import candidates
from loka.probe.profile.profile import Estimate, Interval
from tests.support.plan.plan_costs import MadeUp

SCALED_MM, FBGEMM = "torch.scaled_mm", "fbgemm.rowwise"
AUTO, FP8, KEEP = Compute.AUTO, Compute.FP8, Compute.KEEP
FPROP, DGRAD, WGRAD = Gemm
HOPPER = Situation("h100", 4096, {"p.yaml": "policies/p.yaml"})
E5M2, TENSORWISE = OperandRecipe(format=Format.E5M2), OperandRecipe(scaling=Scaling.TENSORWISE)
BY, KEPT = "fp8 by p.yaml:14", "keep by p.yaml:14"
BRANCH, BLOCKED = "branch on tensor size at models.py:44", "its forward is never called"

PAIRS = {gemm: candidates(gemm)[-1] for gemm in Gemm}  # rowwise powers of two, and what is transposed from them
ROWS = PAIRS[FPROP][0]
NAME = "layers.0.fmb.0"


@pytest.fixture
def decide(make_site):
    """The GEMMs of one site."""

    def make(settings: SiteSettings, situation: Situation = HOPPER, refused: str | None = None, **site: object):
        (plan,) = resolve([make_site(**site)], [settings], situation, {NAME: refused} if refused else {})
        return {gemm.gemm: gemm for gemm in plan.gemms}

    return make


@pytest.mark.parametrize(
    ("asked", "site", "refused", "reasons"),
    [
        ({}, {}, None, [BY] * 3),
        ({"names_one_site": True}, {}, None, [BY] * 3),
        ({"compute": KEEP}, {}, None, [KEPT] * 3),
        ({"compute": AUTO}, {}, None, [NO_EVIDENCE] * 3),
        ({"compute": KEEP, "fprop": FP8}, {}, None, [BY, KEPT, KEPT]),
        ({}, {"input_grad": False}, None, [BY] * 2),
        ({}, {"blocked": BLOCKED}, None, [BLOCKED] * 3),
        ({"compute": KEEP, "wgrad": AUTO}, {"blocked": BLOCKED}, None, [BLOCKED] * 3),
        ({}, {}, BRANCH, [BRANCH] * 3),
        ({"compute": KEEP, "wgrad": AUTO}, {}, BRANCH, [KEPT, KEPT, BRANCH]),  # it is nothing that the site itself is
    ],
)
def test_every_gemm_is_decided_with_a_reason(asked, site, refused, reasons, decide, make_settings):
    settings = make_settings(**asked)
    gemms = decide(settings, refused=refused, **site)
    assert [gemm.reason for gemm in gemms.values()] == reasons
    for name, gemm in gemms.items():
        runs = (SCALED_MM, settings.gemms[name].operands, Accumulation.PRECISE)
        assert (gemm.kernel, gemm.operands, gemm.accumulation) == (runs if gemm.reason == BY else (NATIVE, None, None))
        if gemm.reason != BY and settings.gemms[name].compute is not KEEP:
            assert [(each.kernel, each.reason) for each in gemm.rejected] == [(SCALED_MM, gemm.reason)]


@pytest.mark.parametrize(
    ("changes", "refused", "recipe"),
    [({"blocked": "generated weights"}, None, None), ({}, "a branch", None), ({}, None, E5M2)],
)
def test_a_rule_for_one_site_that_cannot_is_an_error_with_its_place(changes, refused, recipe, decide, make_settings):
    with pytest.raises(InputError) as caught:
        decide(make_settings(names_one_site=True, recipe=recipe), refused=refused, **changes)
    message = str(caught.value)
    assert all(line.startswith("policies/p.yaml:14: rule 1: x asks for ") for line in message.splitlines())
    assert "'layers.0.fmb.0'" in message
    assert "compute: keep" in message
    assert caught.value.exit_status == 2


def test_the_reference_target_takes_recipes_that_hopper_does_not(decide, make_settings):
    settings = make_settings(recipe=replace(E5M2, scaling=Scaling.TENSORWISE))
    assert not decide(settings)[FPROP].fp8
    assert decide(settings, Situation("reference", 4096))[FPROP].fp8
    assert "e5m2 x e5m2" in decide(make_settings(AUTO, recipe=E5M2))[FPROP].reason


def test_sites_that_differ_in_what_decides_do_not_share(make_site, make_settings):
    settings = make_settings()
    sites = [make_site("a"), make_site("b", input_grad=False), make_site("c", blocked="no"), make_site("d", k=100)]
    plans = resolve(sites, [settings] * 4, HOPPER, {})
    assert [len(plan.gemms) for plan in plans] == [3, 2, 3, 3]
    assert [plan.fp8 for plan in plans] == [True, True, False, True]


def pinned(settings: SiteSettings, kernel: str, one_site: bool = False, *gemms: Gemm) -> SiteSettings:
    """The settings with a kernel for some GEMMs, or for all, by a rule."""
    chosen = gemms or tuple(Gemm)
    paths = {f"{gemm.value}.kernel" for gemm in chosen}
    history = {path: (Assignment(path, kernel, "rule 2: y", "p.yaml", 20, one_site),) for path in paths}
    changed = {gemm: replace(settings.gemms[gemm], kernel=kernel) for gemm in chosen}
    return replace(settings, gemms={**settings.gemms, **changed}, history={**settings.history, **history})


@pytest.mark.parametrize("fbgemm", [None, 0.9, 9.0])
def test_the_named_kernel_runs_and_no_other_is_asked(fbgemm, decide, make_settings):
    """Whether nothing was measured, the kernel was not, or it is slower."""
    costs = MadeUp({SCALED_MM: 0.5, "as-is": 1.0} | ({FBGEMM: fbgemm} if fbgemm else {}))
    for situation in (HOPPER, replace(HOPPER, costs=costs)):
        gemms = decide(pinned(make_settings(), FBGEMM, False, DGRAD), situation)
        assert [gemm.kernel for gemm in gemms.values()] == [SCALED_MM, FBGEMM, SCALED_MM]
        assert SCALED_MM not in [each.kernel for each in gemms[DGRAD].rejected]
        assert gemms[DGRAD].reason.startswith(BY)


def test_what_the_named_kernel_cannot_run_stays_with_its_reason(decide, make_settings):
    for gemm in decide(pinned(make_settings(recipe=TENSORWISE), FBGEMM)).values():
        assert (gemm.kernel, gemm.fp8) == (NATIVE, False)
        assert gemm.reason == "FBGEMM GenAI multiplies rowwise x rowwise, not tensorwise x tensorwise"
        assert [each.kernel for each in gemm.rejected] == [FBGEMM]
    auto = decide(pinned(make_settings(recipe=TENSORWISE), "auto", True))  # a later rule takes the kernel back
    assert [gemm.kernel for gemm in auto.values()] == [SCALED_MM] * 3


@pytest.mark.parametrize(("compute", "fp8_too"), [(FP8, False), (AUTO, False), (FP8, True)])
def test_a_rule_for_one_site_that_names_a_kernel_is_an_error_once(compute, fp8_too, decide, make_settings):
    settings = make_settings(compute, recipe=TENSORWISE, names_one_site=fp8_too)
    with pytest.raises(InputError) as caught:
        decide(pinned(settings, "mslk.rowwise", True))
    assert caught.value.code is Code.IMPOSSIBLE
    assert str(caught.value) == (
        "policies/p.yaml:20: rule 2: y wants fprop, dgrad, wgrad of 'layers.0.fmb.0' on mslk.rowwise, which cannot be: "
        "MSLK multiplies rowwise x rowwise, not tensorwise x tensorwise; write another kernel there, or leave it out "
        "[LK022]"
    )


def test_a_gemm_that_is_kept_or_waits_for_evidence_is_no_error(decide, make_settings):
    kept = decide(pinned(make_settings(KEEP, recipe=TENSORWISE), "mslk.rowwise", True))
    assert not any(gemm.fp8 for gemm in kept.values())
    waiting = decide(pinned(make_settings(AUTO), "mslk.rowwise", True))
    assert [(gemm.reason, [each.kernel for each in gemm.rejected]) for gemm in waiting.values()] == [
        (NO_EVIDENCE, ["mslk.rowwise"])
    ] * 3


def test_an_unknown_kernel_is_an_error_with_its_place_once(make_site, make_settings):
    settings = pinned(make_settings(), "torch.scaled_nn")
    with pytest.raises(InputError) as caught:
        resolve([make_site("a"), make_site("b")], [settings, settings], HOPPER, {})
    assert caught.value.code is Code.IMPOSSIBLE
    assert str(caught.value).startswith(
        "policies/p.yaml:20: there is no kernel 'torch.scaled_nn'; did you mean 'torch.scaled_mm'?"
    )


@pytest.mark.parametrize("target", [spec.name for spec in DEVICES.values() if spec.scaled_mm.e4m3 == OCP])
def test_transposed_operands_run_where_their_sources_do(decide, chain_settings, target: str) -> None:
    gemms = decide(chain_settings(pairs=PAIRS), Situation(target, 4096))
    assert {name: gemm.operands for name, gemm in gemms.items()} == PAIRS
    assert {gemm.reason for gemm in gemms.values()} == {BY}


STAYS = "{} is to be transposed from {}'s, which stays as it is".format
ANOTHER = "{} is to be transposed from fprop's, which is {}; give fprop scaling: rowwise, range: dynamic".format


@pytest.mark.parametrize(
    ("asked", "fprop", "site", "reasons"),
    [
        ({"fprop": KEEP}, None, {}, {DGRAD: STAYS("weight", "fprop"), WGRAD: STAYS("input", "fprop")}),
        ({"dgrad": KEEP}, None, {}, {FPROP: BY, WGRAD: STAYS("grad_output", "dgrad")}),
        ({"dgrad": KEEP}, None, {"input_grad": False}, {FPROP: BY, WGRAD: BY}),
        (
            {},
            (ROWS, replace(ROWS, power_of_two=False)),
            {},
            {
                FPROP: BY,
                DGRAD: ANOTHER("weight", "e4m3 rowwise") + " and power_of_two: true",
                WGRAD: STAYS("grad_output", "dgrad"),
            },
        ),
        (
            {},
            (replace(ROWS, scaling=Scaling.TENSORWISE),) * 2,
            {},
            {WGRAD: ANOTHER("input", "e4m3 tensorwise pow2")},
        ),
        (
            {},
            (replace(ROWS, range=Range.STATIC, amax=2.0),) * 2,
            {},
            {WGRAD: ANOTHER("input", "e4m3 rowwise static(2) pow2")},
        ),
        (
            {},
            (replace(ROWS, scaling=Scaling.BLOCKWISE_1X128),) * 2,
            {},
            {WGRAD: ANOTHER("input", "e4m3 blockwise_1x128 pow2")},
        ),
        (
            {},
            PAIRS[WGRAD],
            {},
            {FPROP: "weight is read along its rows in fprop; there is nothing to transpose it from"},
        ),
    ],
)
def test_what_cannot_be_transposed_says_why(asked, fprop, site, reasons, decide, chain_settings) -> None:
    gemms = decide(chain_settings(pairs={**PAIRS, FPROP: fprop or PAIRS[FPROP]}, **asked), **site)
    for name, reason in reasons.items():
        found = gemms[name]
        assert found.reason.startswith(reason)
        assert found.fp8 is (reason == BY)
        if not found.fp8:
            assert (found.kernel, found.operands) == (NATIVE, None)
            assert (SCALED_MM, found.reason) in [(each.kernel, each.reason) for each in found.rejected]


def test_e5m2_can_be_transposed_too(decide, chain_settings) -> None:
    pairs = {gemm: (replace(PAIRS[gemm][0], format=Format.E5M2), PAIRS[gemm][1]) for gemm in (DGRAD, WGRAD)}
    gemms = decide(chain_settings(pairs={**PAIRS, **pairs}))
    assert all(gemm.fp8 for gemm in gemms.values())
    assert format_gemm(gemms[WGRAD]) == "grad_output e5m2 transposed, input e4m3 transposed"


def test_auto_follows_the_evidence_of_transposed_operands_and_of_their_sources(
    decide, chain_settings, make_known
) -> None:
    def reasons(settings: SiteSettings, known) -> list[str]:
        return [gemm.reason for gemm in decide(settings, replace(HOPPER, known=known)).values()]

    def safe(gemm: Gemm, mere: float = 0.02) -> Estimate:
        return Estimate(gemm, PAIRS[gemm], Interval(mere, 0.9 * mere, 1.1 * mere), Interval(30, 29, 31), 16)

    auto = chain_settings(AUTO, pairs=PAIRS)
    assert reasons(auto, make_known({NAME: tuple(map(safe, Gemm))})) == ["safe by evidence, auto by p.yaml:14"] * 3
    untried = reasons(auto, make_known({NAME: (safe(FPROP), safe(DGRAD))}))
    assert untried[2] == "no evidence for e4m3 transposed: run loka probe"
    unsafe = reasons(auto, make_known({NAME: (safe(FPROP, 0.5), safe(DGRAD), safe(WGRAD))}))
    assert unsafe[2] == STAYS("input", "fprop")
    forward = make_known({NAME: ()}, seen=(Operand.INPUT, Operand.WEIGHT))
    unseen = reasons(chain_settings(pairs=PAIRS, dgrad=AUTO), forward)
    assert unseen[1:] == ["no evidence: grad_output was never seen while probing", STAYS("grad_output", "dgrad")]


def test_transposed_operands_are_taken_in_the_form_that_a_kernel_takes():
    transposed = OperandRecipe(scaling=Scaling.TENSORWISE, power_of_two=True, transposed=True)
    rows, e5m2 = replace(transposed, scaling=Scaling.ROWWISE), replace(transposed, format=Format.E5M2)
    for kernel, asked, taken in (
        (SCALED_MM, (transposed, transposed), (transposed, transposed)),
        (FBGEMM, (transposed, transposed), (rows, rows)),
        (FBGEMM, (transposed, e5m2), (transposed, e5m2)),
        (FBGEMM, (TENSORWISE, TENSORWISE), (TENSORWISE, TENSORWISE)),
    ):
        settings = GemmSettings(FP8, asked)
        assert accepted_operands(kernel_named(kernel), WGRAD, settings, SiteSizes(4096, 512, 256), "h100") == taken
