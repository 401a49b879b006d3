"""Decisions by time: which GEMMs of a site run in FP8, on which kernel, and the reasons that they carry."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from loka.codegen.modules.linear_recipes import site_recipe
from loka.graph.sites.site import RowCount
from loka.kernels.gemm.catalogue import GEMM_KERNELS as KERNELS_OF_CATALOGUE
from loka.kernels.gemm.catalogue import SCALED_MM as CUBLASLT
from loka.kernels.measurements.parts import Part, PartKind, TimeSource
from loka.numerics.enums import Accumulation, Compute, Fuse, Gemm, Scaling
from loka.plan.decide import Situation
from loka.plan.evidence import ProfiledSites
from loka.plan.format import format_decision
from loka.plan.plan import NATIVE, GemmPlan, SitePlan
from loka.plan.resolve import resolve
from loka.plan.select.workload import Surroundings, TracedNeighbours
from loka.policy.settings import SiteSettings
from loka.probe.profile.profile import Interval
from tests.support.plan.plan_costs import CHAIN, SAFE_CHAIN, SCALED_MM, AnyGemm, MadeUp

NAME = "layers.0.fmb.0"
OTHER = AnyGemm("zz.other")
FAST, PRECISE = Accumulation.FAST, Accumulation.PRECISE
KERNELS = {NATIVE: 1.0, SCALED_MM: 1.0, OTHER.name: 1.0}


@pytest.fixture
def wanted(chain_settings) -> Callable[..., SiteSettings]:
    """Settings of the transposed recipe."""
    return lambda compute=Compute.AUTO, **more: chain_settings(compute, **more)


@pytest.fixture
def safe(make_known) -> Callable[..., ProfiledSites]:
    """A profile in which the transposed recipe is safe at some sites, except for some GEMMs."""

    def make(*names: str, unsafe: tuple[Gemm, ...] = ()) -> ProfiledSites:
        bad = Interval(0.5, 0.5, 0.5)
        estimates = tuple(replace(each, mere=bad) if each.gemm in unsafe else each for each in SAFE_CHAIN)
        return make_known(dict.fromkeys(names or (NAME,), estimates))

    return make


@pytest.fixture
def decide(make_site, safe):
    """The plan of one site."""

    def make(
        settings: SiteSettings, costs: MadeUp | None, kernels=(CUBLASLT, OTHER), known=None, traced=None, **changes
    ) -> SitePlan:
        situation = Situation("h100", 4096, kernels=tuple(kernels), known=known or safe(), costs=costs)
        (plan,) = resolve([make_site(**changes)], [settings], situation, {}, traced)
        return plan

    return make


def gemm_of(plan: SitePlan, gemm: Gemm) -> GemmPlan:
    return next(each for each in plan.gemms if each.gemm is gemm)


@pytest.mark.parametrize(
    ("asked", "size", "fp8", "reason"),
    [
        ({}, 4096, True, r"safe by evidence and faster, auto by p\.yaml:14"),
        ({}, 64, False, r"kept: BF16 is faster here: .* us \(measured\)"),
        ({"min_speedup": 3.0}, 4096, False, "kept: .*x is under min_speedup 3: .*"),
        ({"compute": Compute.FP8}, 4096, True, r"fp8 by p\.yaml:14"),
        ({"compute": Compute.FP8}, 64, True, r"fp8 by p\.yaml:14, slower than BF16 here"),
        # wgrad is transposed from fprop's and dgrad's operands
        ({"wgrad": Compute.FP8}, 64, True, r"(fp8|safe by evidence, auto) by p\.yaml:14, slower than BF16 here"),
        ({"compute": Compute.KEEP}, 4096, False, r"keep by p\.yaml:14"),
    ],
)
def test_a_site_goes_by_its_times_within_what_the_policy_says(asked, size, fp8, reason, decide, wanted) -> None:
    plan = decide(wanted(**asked), MadeUp(KERNELS), k=size, n=size)
    for gemm in plan.gemms:
        assert gemm.fp8 is fp8
        assert re.fullmatch(reason, gemm.reason)
        assert fp8 or (gemm.kernel, gemm.operands, gemm.accumulation) == (NATIVE, None, None)
    assert plan.timing is not None
    assert plan.timing.chosen.source is TimeSource.MEASURED
    assert plan.timing.kept is ("kept" in reason)
    assert (plan.timing.chosen == plan.timing.without_fp8) is not fp8
    assert plan.timing.without_fp8.us < plan.timing.as_is.us  # fused, which FP8 gets no credit for
    assert (plan.timing.by_fp8 > 1.2) is (fp8 and size == 4096)
    ways = {option.kernels: option for option in plan.options}
    assert len(ways) == len(plan.options) == 4  # with transposed operands: none, fprop, fprop and dgrad, all
    (chosen,) = (each for each in plan.options if each.outcome == "chosen")
    assert chosen.time == plan.timing.chosen
    if fp8 and not asked:
        assert all(each.outcome.startswith("slower: ") for each in plan.options if each is not chosen)
    elif asked.get("compute") is Compute.KEEP:
        assert all(each.outcome.startswith("not in FP8: ") for each in plan.options if each is not chosen)


def test_each_gemm_has_the_fastest_kernel_and_the_other_says_why_it_lost(decide, wanted) -> None:
    def factor(part: Part) -> float:
        return 0.8 if part.kernel == OTHER.name and part.contraction == 4096 else 1.0

    plan = decide(wanted(Compute.FP8), MadeUp(KERNELS, factor), k=2048, n=1024)
    assert [gemm.kernel for gemm in plan.gemms] == [SCALED_MM, SCALED_MM, OTHER.name]
    (lost,) = gemm_of(plan, Gemm.WGRAD).rejected
    assert lost.kernel == SCALED_MM
    assert lost.reason.startswith("slower than zz.other: ")
    assert [each.kernel for each in gemm_of(plan, Gemm.FPROP).times] == [SCALED_MM, OTHER.name, NATIVE]
    assert gemm_of(plan, Gemm.FPROP).times[0].sqnr_db == 31.5


def test_what_cannot_be_told_apart_goes_by_the_catalogue(decide, wanted) -> None:
    faster = {**KERNELS, OTHER.name: 0.99}
    plan = decide(wanted(Compute.FP8), MadeUp(faster, spread=0.02))
    assert {gemm.kernel for gemm in plan.gemms} == {SCALED_MM}
    assert "no faster than torch.scaled_mm beyond the noise" in gemm_of(plan, Gemm.FPROP).rejected[0].reason
    exact = decide(wanted(Compute.FP8), MadeUp(faster, spread=0.001))
    assert {gemm.kernel for gemm in exact.gemms} == {OTHER.name}
    names = ("aa.other", "zz.other")
    unknown = [AnyGemm(name) for name in reversed(names)]
    plan = decide(wanted(Compute.FP8), MadeUp({NATIVE: 1.0, **dict.fromkeys(names, 1.0)}), kernels=unknown)
    assert {gemm.kernel for gemm in plan.gemms} == {"aa.other"}  # both unknown to the catalogue: by name


def test_transposed_operands_take_the_form_of_the_fastest_kernel(decide, wanted) -> None:
    """FBGEMM takes scales by rows alone; copies that are transposed have one scale, which serves as either."""
    kernels = tuple(kernel for kernel in KERNELS_OF_CATALOGUE if kernel.name in (SCALED_MM, "fbgemm.rowwise"))
    costs = MadeUp({NATIVE: 1.0, SCALED_MM: 1.0, "fbgemm.rowwise": 0.8})
    plan = decide(wanted(Compute.FP8), costs, kernels=kernels)
    assert {gemm.kernel for gemm in plan.gemms} == {"fbgemm.rowwise"}
    wgrad = gemm_of(plan, Gemm.WGRAD)
    assert {operand.scaling for operand in wgrad.operands} == {Scaling.ROWWISE}
    assert wgrad.m_buckets == ()
    own = decide(wanted(Compute.FP8), MadeUp({NATIVE: 1.0, SCALED_MM: 1.0, "fbgemm.rowwise": 1.5}), kernels=kernels)
    assert gemm_of(own, Gemm.WGRAD).operands == CHAIN[Gemm.WGRAD]


def fast_gains(part: Part) -> float:
    """Fast sums take 10 % less, but for wgrad."""
    return 0.9 if part.recipe.endswith("fast") and part.contraction != 4096 else 1.0


def may_be_fast(settings: SiteSettings) -> SiteSettings:
    return replace(settings, gemms={gemm: replace(each, may_be_fast=True) for gemm, each in settings.gemms.items()})


def test_accumulation_auto_is_fast_where_that_is_faster_and_as_accurate(decide, wanted) -> None:
    settings = may_be_fast(wanted(Compute.FP8))
    plan = decide(settings, MadeUp(KERNELS, fast_gains), k=2048, n=1024)
    assert [gemm.accumulation for gemm in plan.gemms] == [FAST, FAST, PRECISE]
    fprop, wgrad = gemm_of(plan, Gemm.FPROP), gemm_of(plan, Gemm.WGRAD)
    assert [(each.kernel, each.accumulation) for each in fprop.times][:2] == [(SCALED_MM, PRECISE), (SCALED_MM, FAST)]
    assert fprop.rejected[0].kernel == SCALED_MM
    assert fprop.rejected[0].reason.startswith("slower than torch.scaled_mm fast: ")
    assert wgrad.rejected[0].reason.startswith("no faster than torch.scaled_mm beyond the noise")
    without = decide(settings, None)
    assert {gemm.accumulation for gemm in without.gemms} == {PRECISE}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ((0.12, 31.0), "fast sums err more: MERE 0.12, SQNR 31.0 dB, with precise ones 0.12 and 31.5 dB"),
        ((0.14, 31.5), "fast sums err more: MERE 0.14, SQNR 31.5 dB, with precise ones 0.12 and 31.5 dB"),
        (None, "the error of fast sums was never measured beside that of precise ones"),
    ],
)
def test_fast_sums_that_err_more_are_no_choice(error, reason, decide, wanted) -> None:
    plan = decide(may_be_fast(wanted(Compute.FP8)), MadeUp(KERNELS, fast_gains, fast_error=error), kernels=[CUBLASLT])
    assert {gemm.accumulation for gemm in plan.gemms} == {PRECISE}
    lost = {each.kernel: each.reason for each in gemm_of(plan, Gemm.FPROP).rejected}
    assert lost == {"torch.scaled_mm fast": reason}


def test_a_chain_of_both_accumulations_is_one(decide, wanted) -> None:
    plan = decide(may_be_fast(wanted(Compute.FP8)), MadeUp(KERNELS, fast_gains), input_grad=False)
    assert site_recipe(plan).operands.is_chain


def test_batches_of_other_sizes_have_the_kernel_that_is_fastest_there(decide, wanted) -> None:
    def factor(part: Part) -> float:
        rows = part.contraction if part.columns == 2048 and part.rows == 1024 else part.rows  # of the batch
        return 0.8 if part.kernel == OTHER.name and rows <= 1024 else 1.0

    plan = decide(wanted(Compute.FP8), MadeUp(KERNELS, factor), k=2048, n=1024)
    for gemm in plan.gemms:
        assert gemm.kernel == SCALED_MM
        assert gemm.m_buckets == ((1024, OTHER.name), (32768, SCALED_MM))
        assert format_decision(plan, gemm.gemm).endswith(" by zz.other up to M 1024, torch.scaled_mm above")
    noisy = decide(wanted(Compute.FP8), MadeUp(KERNELS, factor, spread=0.3), k=2048, n=1024)
    assert {gemm.m_buckets for gemm in noisy.gemms} == {()}
    same = decide(wanted(Compute.FP8), MadeUp(KERNELS), k=2048, n=1024)
    assert {gemm.m_buckets for gemm in same.gemms} == {()}


def test_other_batches_need_no_library_that_the_planned_one_does_without(decide, wanted) -> None:
    kernels = tuple(kernel for kernel in KERNELS_OF_CATALOGUE if kernel.name in (SCALED_MM, "fbgemm.rowwise"))

    def planned(fbgemm_below: int) -> GemmPlan:
        def factor(part: Part) -> float:
            return 0.8 if part.kernel == "fbgemm.rowwise" and part.rows <= fbgemm_below else 1.0

        costs = MadeUp({NATIVE: 1.0, SCALED_MM: 1.0, "fbgemm.rowwise": 1.0}, factor)
        plan = decide(wanted(Compute.KEEP, fprop=Compute.FP8), costs, kernels=kernels, k=2048, n=1024)
        return gemm_of(plan, Gemm.FPROP)

    assert (planned(1024).kernel, planned(1024).m_buckets) == (SCALED_MM, ())
    assert (planned(8192).kernel, planned(8192).m_buckets) == ("fbgemm.rowwise", ())


def test_a_small_batch_has_its_own_kernel_up_to_256_rows(decide, wanted) -> None:
    costs = MadeUp(KERNELS, lambda part: 1.0 if part.kernel != OTHER.name else 0.8 if part.rows == 200 else 1.2)
    plan = decide(
        wanted(Compute.FP8, dgrad=Compute.KEEP), costs, k=2048, n=1024, rows=RowCount(0, 200), input_grad=False
    )
    fprop = gemm_of(plan, Gemm.FPROP)
    assert (fprop.kernel, fprop.m_buckets) == (OTHER.name, ((256, OTHER.name), (1024, SCALED_MM)))


def test_a_kernel_with_wrong_numbers_is_never_taken(decide, wanted) -> None:
    costs = MadeUp({**KERNELS, OTHER.name: 0.1}, wrong={OTHER.name: "SQNR 3 dB"})
    plan = decide(wanted(Compute.FP8), costs)
    assert {gemm.kernel for gemm in plan.gemms} == {SCALED_MM}
    assert gemm_of(plan, Gemm.FPROP).rejected[-1].reason == "its numbers were wrong when it was measured: SQNR 3 dB"
    none_right = decide(wanted(Compute.FP8), costs, kernels=[OTHER])
    assert not none_right.fp8
    assert "its numbers were wrong" in gemm_of(none_right, Gemm.FPROP).reason


def test_kernels_that_were_not_measured_lose_to_those_that_were(decide, wanted) -> None:
    plan = decide(wanted(Compute.FP8), MadeUp({NATIVE: 1.0, OTHER.name: 5.0}))
    assert {gemm.kernel for gemm in plan.gemms} == {OTHER.name}
    assert gemm_of(plan, Gemm.FPROP).rejected[0].reason == ("never measured with e4m3 rowwise, e4m3 rowwise, precise")


@pytest.mark.parametrize(
    "costs",
    [
        None,
        MadeUp({}),
        MadeUp({NATIVE: 1.0}),
        MadeUp({SCALED_MM: 1.0}),
        MadeUp(factor=lambda part: 1.0 if part.work is PartKind.GEMM else None),
    ],
)
@pytest.mark.parametrize("compute", [Compute.AUTO, Compute.FP8])
def test_without_enough_measurements_the_plan_is_that_without_any(costs, compute, decide, wanted) -> None:
    bare = decide(wanted(compute), None)
    plan = decide(wanted(compute), costs)
    assert plan == bare
    assert plan.timing is None
    assert gemm_of(plan, Gemm.FPROP).rejected[0].reason == "torch.scaled_mm is preferred where no measurement decides"


def test_evidence_and_time_both_have_to_agree(decide, wanted, safe) -> None:
    costs = MadeUp(KERNELS)
    unsafe = decide(wanted(), costs, known=safe(unsafe=tuple(Gemm)), k=4096, n=4096)
    assert not unsafe.fp8
    assert gemm_of(unsafe, Gemm.FPROP).reason.startswith("unsafe: MERE")
    assert gemm_of(unsafe, Gemm.WGRAD).reason == "input is to be transposed from fprop's, which stays as it is"
    assert unsafe.timing is not None
    assert not unsafe.timing.kept
    half = decide(wanted(fuse=Fuse.NEVER), costs, known=safe(unsafe=(Gemm.WGRAD,)), k=4096, n=4096)
    assert [gemm.fp8 for gemm in half.gemms] == [True, True, False]
    assert gemm_of(half, Gemm.WGRAD).reason.startswith("unsafe: MERE")


def test_gemms_are_chosen_together_since_they_share_what_is_quantized(decide, wanted) -> None:
    """wgrad's FP8 product alone is faster, and loses to the transposed copies that it needs."""
    costs = MadeUp(KERNELS, lambda part: 30.0 if part.work is PartKind.REQUANTIZE_TRANSPOSE else 1.0)
    plan = decide(wanted(fuse=Fuse.NEVER), costs, k=4096, n=4096, input_grad=False)
    assert [gemm.fp8 for gemm in plan.gemms] == [True, False]
    assert gemm_of(plan, Gemm.WGRAD).reason.startswith("kept: BF16 is faster here: ")
    products = {each.kernel: each.us for each in gemm_of(plan, Gemm.WGRAD).times}
    assert products[SCALED_MM] < products[NATIVE]


@pytest.mark.slow
def test_a_chain_of_neighbours_is_decided_as_a_whole(make_site, wanted, safe) -> None:
    """The second linear's input comes from the first's kernel: alone it loses, together both gain."""
    names = ("a", "b")
    sites = [make_site("a", k=1024, n=4096), make_site("b", k=4096, n=1024)]
    chain = TracedNeighbours(
        (names,),
        {"a": Surroundings("", "layer_norm silu", True, False), "b": Surroundings("layer_norm silu", "", False, True)},
    )
    apart = TracedNeighbours(tuple((name,) for name in names), chain.around)

    def fp8(traced: TracedNeighbours, min_speedup: float) -> list[bool]:
        situation = Situation(
            "h100",
            4096,
            known=safe(*names),
            costs=MadeUp(KERNELS),
        )
        settings = wanted(min_speedup=min_speedup)
        return [plan.fp8 for plan in resolve(sites, [settings] * 2, situation, {}, traced)]

    floors = [1 + step / 100 for step in range(60)]
    together = [fp8(chain, floor) for floor in floors]
    alone = [fp8(apart, floor) for floor in floors]
    assert [False, False] in together
    assert all(joined >= single for joined, single in zip(together, alone, strict=True))
    assert any(joined == [True, True] != single for joined, single in zip(together, alone, strict=True))


@pytest.mark.parametrize(("fuse", "gains"), [(Fuse.AUTO, True), (Fuse.NEVER, False), (Fuse.ALWAYS, False)])
def test_fuse_auto_takes_neighbours_along_where_that_gains(fuse, gains, decide, wanted) -> None:
    plan = decide(wanted(fuse=fuse), MadeUp(KERNELS), k=4096, n=4096)
    assert plan.gains_by_fusing is gains
    nothing = decide(wanted(fuse=fuse), MadeUp(KERNELS), k=4096, n=4096, fed_by=(), followed_by=())
    assert not nothing.gains_by_fusing
    alone = TracedNeighbours(alone=frozenset({NAME}))
    assert not decide(wanted(fuse=fuse), MadeUp(KERNELS), k=4096, n=4096, traced=alone).gains_by_fusing


def test_a_blocked_site_is_not_timed(decide, wanted) -> None:
    plan = decide(wanted(), MadeUp(KERNELS), blocked="generated weights")
    assert (plan.timing, plan.options) == (None, ())
    assert {gemm.reason for gemm in plan.gemms} == {"generated weights"}


def test_sites_that_are_alike_share_their_decisions_and_lookups(make_site, wanted) -> None:
    costs = MadeUp(KERNELS)
    settings = wanted(Compute.FP8)
    sites = [make_site(f"layers.{i}.fmb.0") for i in range(3)]
    situation = Situation("h100", 4096, costs=costs)
    first, second, third = resolve(sites, [settings] * 3, situation, {})
    assert first.gemms is second.gemms is third.gemms
    assert first.options is third.options
    asked = costs.asked
    resolve(sites[:1], [settings], situation, {})
    assert costs.asked == 2 * asked


def test_a_linear_that_keeps_wgrad_alone_stays_in_its_chain(make_site, wanted, safe) -> None:
    """As `down` of a cross layer, between products and sums: the next linear's input comes from its kernel."""
    names = ("down", "up")
    around = {"down": Surroundings("", "", True, False), "up": Surroundings("silu", "", False, True)}
    sites = [make_site(name, k=2048, n=2048, fed_by=(), followed_by=()) for name in names]

    def forward_of_up(**down: Compute) -> float:
        situation = Situation("h100", 4096, known=safe(*names), costs=MadeUp(KERNELS))
        settings = [wanted(Compute.FP8, **down), wanted(Compute.FP8)]
        plans = resolve(sites, settings, situation, {}, TracedNeighbours((names,), around))
        assert plans[1].timing is not None
        return plans[1].timing.chosen.forward

    assert forward_of_up(wgrad=Compute.KEEP) == forward_of_up()
    assert forward_of_up() < forward_of_up(wgrad=Compute.KEEP, dgrad=Compute.KEEP)


@pytest.mark.parametrize("written", [Scaling.TENSORWISE, Scaling.ROWWISE])
@pytest.mark.parametrize("faster", [Scaling.TENSORWISE, Scaling.ROWWISE])
def test_transposed_operands_take_the_form_that_is_faster(decide, wanted, written, faster) -> None:
    """Their one scale can stand there once or for each row; GEMMs that read the two differ in time alone."""

    def factor(part: Part) -> float:
        return 1.0 if part.work is not PartKind.GEMM or not part.recipe or faster.value in part.recipe else 1.2

    settings = wanted(Compute.FP8)
    first, second = (replace(each, scaling=written) for each in settings.gemms[Gemm.WGRAD].operands)
    gemms = {**settings.gemms, Gemm.WGRAD: replace(settings.gemms[Gemm.WGRAD], operands=(first, second))}
    plan = decide(replace(settings, gemms=gemms), MadeUp(KERNELS, factor), kernels=(CUBLASLT,), k=4096, n=4096)
    found = gemm_of(plan, Gemm.WGRAD)
    assert found.operands is not None
    assert {each.scaling for each in found.operands} == {faster}
    assert all(each.transposed for each in found.operands)
    assert {each.scaling for each in gemm_of(plan, Gemm.FPROP).operands or ()} == {Scaling.ROWWISE}
    assert site_recipe(plan).operands.is_chain
    level = decide(replace(settings, gemms=gemms), MadeUp(KERNELS), kernels=(CUBLASLT,), k=4096, n=4096)
    assert {each.scaling for each in gemm_of(level, Gemm.WGRAD).operands or ()} == {written}
