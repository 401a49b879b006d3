"""What holds of every choice by time, whatever the times are."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.graph.sites.site import GemmKind, RowCount, Site
from loka.kernels.measurements.parts import Part
from loka.numerics.enums import Accumulation, Compute, Fuse, Gemm
from loka.numerics.recipe import OperandRecipe, Recipe, transposed_form
from loka.plan.decide import Situation
from loka.plan.evidence import ProfiledSites
from loka.plan.plan import NATIVE, SitePlan
from loka.plan.resolve import resolve
from loka.plan.select.perf_model import PerfModel
from loka.plan.select.workload import SiteSizes, Surroundings, TracedNeighbours, gemm_part, surroundings_of, workload_of
from loka.policy.settings import Budget, GemmSettings, SiteSettings
from loka.probe.profile.profile import Estimate, Interval, Profile, SiteProfile
from tests.support.plan.plan_costs import CHAIN, SCALED_MM, AnyGemm, MadeUp

OTHERS = (AnyGemm("a.first"), AnyGemm("b.second"))
KERNELS = (*OTHERS, AnyGemm(SCALED_MM))
NAMES = tuple(kernel.name for kernel in KERNELS)
PLAIN = dict.fromkeys(Gemm, (OperandRecipe(), OperandRecipe()))
BATCH = 4096

widths = st.sampled_from((16, 64, 256, 1024, 4096))
seeds = st.integers(0, 10_000)
recipes = st.sampled_from((CHAIN, PLAIN))
computes = st.sampled_from(tuple(Compute))
floors = st.floats(1.0, 2.0)
fuses = st.sampled_from((Fuse.ALWAYS, Fuse.NEVER))


def site_of(name: str, k: int, n: int, input_grad: bool = True) -> Site:
    around = (("layer_norm",), ("layer_norm", "silu"))
    return Site(
        name, GemmKind.LINEAR, "", f"{name}.weight", None, RowCount(1), k, n, 1, 1, 0.1, input_grad, *around, ""
    )


def profile_of(*names: str) -> ProfiledSites:
    fine = Interval(0.01, 0.01, 0.01), Interval(40, 40, 40)
    estimates = tuple(Estimate(gemm, recipe[gemm], *fine, 16) for recipe in (CHAIN, PLAIN) for gemm in Gemm)
    sites = tuple(SiteProfile(name, 0, 0, BATCH, (), estimates) for name in names)
    return ProfiledSites.of(Profile("p", "m", "0", "2026-01-01T00:00:00Z", 10, 1, 10, BATCH, sites, ()))


def settings_of(recipe, asked, floor: float, fuse: Fuse) -> SiteSettings:
    gemms = {gemm: GemmSettings(compute, recipe[gemm]) for gemm, compute in zip(Gemm, asked, strict=True)}
    return SiteSettings(gemms, Budget(min_speedup=floor), fuse)


def costs_of(seed: int, spread: float = 0.0, scale: float = 1.0) -> MadeUp:
    """Each part off its bound by a factor of its own, up to two on either side."""

    def factor(part: Part) -> float:
        return 2.0 ** Random(f"{seed} {part}").uniform(-1, 1)

    return MadeUp(dict.fromkeys((NATIVE, *NAMES), 1.0), factor, spread, scale=scale)


def planned(site: Site, wanted: SiteSettings, costs: MadeUp, kernels=KERNELS) -> SitePlan:
    situation = Situation("h100", BATCH, kernels=tuple(kernels), known=profile_of(site.name), costs=costs)
    return resolve([site], [wanted], situation, {})[0]


def time_of(site: Site, wanted: SiteSettings, kernels: tuple[str, ...], costs: MadeUp) -> float:
    """The time of any combination of kernels, added up here part by part."""
    sizes, perf_model = SiteSizes(BATCH, site.k, site.n), PerfModel(costs)
    gemms = [gemm for gemm in Gemm if gemm is not Gemm.DGRAD or site.input_grad]
    pairs = {
        gemm: None if kernel == NATIVE else wanted.gemms[gemm].operands
        for gemm, kernel in zip(gemms, kernels, strict=True)
    }
    workload = workload_of(sizes, Recipe.of(pairs), surroundings_of(site), wanted.fuse is Fuse.ALWAYS, False)

    def product_us(gemm: Gemm, kernel: str) -> float:
        """In whichever form of its operands a kernel is faster."""
        pair, how = pairs[gemm], Accumulation.PRECISE if pairs[gemm] else None
        forms = {pair, transposed_form(pair) if pair is not None else None} if kernel != NATIVE else {None}
        parts = (gemm_part(gemm, sizes, kernel, form, how) for form in forms if form is not None or kernel == NATIVE)
        return min(latency.us for part in parts if (latency := perf_model.part(part)))

    around = sum(latency.us for part in (*workload.forward, *workload.backward) if (latency := perf_model.part(part)))
    return around + sum(product_us(gemm, kernel) for gemm, kernel in zip(gemms, kernels, strict=True))


def is_valid(site: Site, wanted: SiteSettings, kernels: tuple[str, ...]) -> bool:
    """Whether what is transposed has its source in FP8 too, and what the policy forces or keeps is respected."""
    gemms = [gemm for gemm in Gemm if gemm is not Gemm.DGRAD or site.input_grad]
    fp8 = {gemm for gemm, kernel in zip(gemms, kernels, strict=True) if kernel != NATIVE}
    if wanted.gemms[Gemm.FPROP].operands == CHAIN[Gemm.FPROP]:
        order = [gemm for gemm in Gemm if gemm in gemms]
        if fp8 != set(order[: len(fp8)]):
            return False
    able = set(gemms)
    for gemm in gemms:  # what is transposed from a GEMM that the policy keeps cannot run either
        chained = wanted.gemms[Gemm.FPROP].operands == CHAIN[Gemm.FPROP]
        kept = wanted.gemms[gemm].compute is Compute.KEEP
        if kept:
            able -= set(gemms[gemms.index(gemm) :]) if chained else {gemm}
    forced = {gemm for gemm in able if wanted.gemms[gemm].compute is Compute.FP8}
    return forced <= fp8 <= able


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(widths, widths, st.booleans(), seeds, recipes, st.tuples(computes, computes, computes), floors, fuses)
def test_the_choice_is_the_fastest_of_all_combinations_unless_it_gains_too_little(
    k, n, input_grad, seed, recipe, asked, floor, fuse
) -> None:
    site, wanted, costs = site_of("a", k, n, input_grad), settings_of(recipe, asked, floor, fuse), costs_of(seed)
    plan = planned(site, wanted, costs)
    chosen = tuple(gemm.kernel for gemm in plan.gemms)
    combinations = [each for each in product((*NAMES, NATIVE), repeat=len(plan.gemms)) if is_valid(site, wanted, each)]
    assert chosen in combinations
    times = {each: time_of(site, wanted, each, costs) for each in combinations}
    fewest = min(sum(kernel != NATIVE for kernel in each) for each in combinations)
    least = min(time for each, time in times.items() if sum(kernel != NATIVE for kernel in each) == fewest)
    best = min(times.values())
    if least / best >= floor * (1 + 1e-9):
        assert times[chosen] == pytest.approx(best)
    else:
        assert times[chosen] in (pytest.approx(least), pytest.approx(best))
        assert times[chosen] <= least * (1 + 1e-9)
    if not any(compute is Compute.FP8 for compute in asked):
        assert times[chosen] <= times[(NATIVE,) * len(chosen)] * (1 + 1e-9)
    assert plan.timing is not None
    assert plan.timing.chosen.us == pytest.approx(times[chosen], abs=0.002)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(widths, widths, seeds, recipes, floors, st.permutations(KERNELS), st.sampled_from((0.0, 0.05)))
def test_the_order_in_which_kernels_are_asked_changes_nothing(k, n, seed, recipe, floor, order, spread) -> None:
    site, wanted = site_of("a", k, n), settings_of(recipe, (Compute.AUTO,) * 3, floor, Fuse.ALWAYS)
    plain, permuted = (planned(site, wanted, costs_of(seed, spread), kernels) for kernels in (KERNELS, order))
    assert plain.timing == permuted.timing
    assert plain.options == permuted.options
    assert [(gemm.kernel, gemm.reason, gemm.times) for gemm in plain.gemms] == [
        (gemm.kernel, gemm.reason, gemm.times) for gemm in permuted.gemms
    ]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(widths, widths, seeds, recipes, floors, st.sampled_from((0.25, 8.0)), st.sampled_from((0.0, 0.05)))
def test_only_ratios_of_times_matter(k, n, seed, recipe, floor, scale, spread) -> None:
    site, wanted = site_of("a", k, n), settings_of(recipe, (Compute.AUTO,) * 3, floor, Fuse.ALWAYS)
    plain, scaled = (planned(site, wanted, costs_of(seed, spread, each)) for each in (1.0, scale))
    assert [gemm.kernel for gemm in plain.gemms] == [gemm.kernel for gemm in scaled.gemms]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(widths, widths, seeds, recipes, floors, floors, fuses, st.sampled_from((0.0, 0.05)))
def test_a_higher_min_speedup_never_adds_fp8(k, n, seed, recipe, one, other, fuse, spread) -> None:
    low, high = sorted((one, other))
    site = site_of("a", k, n)
    found = [
        planned(site, settings_of(recipe, (Compute.AUTO,) * 3, floor, fuse), costs_of(seed, spread))
        for floor in (low, high)
    ]
    fp8 = [{gemm.gemm for gemm in plan.gemms if gemm.fp8} for plan in found]
    assert fp8[1] <= fp8[0]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(widths, min_size=3, max_size=6), seeds, floors, floors)
def test_in_a_chain_neither_and_it_is_never_slower_than_as_it_was(sizes, seed, one, other) -> None:
    low, high = sorted((one, other))
    names = tuple(f"s{number}" for number in range(len(sizes) - 1))
    sites = [site_of(name, k, n) for name, k, n in zip(names, sizes[:-1], sizes[1:], strict=True)]
    middle = {name: Surroundings("silu" if number else "", "silu") for number, name in enumerate(names)}
    around = {name: replace(each, first=name == names[0], last=name == names[-1]) for name, each in middle.items()}
    fp8 = []
    for floor in (low, high):
        wanted = settings_of(CHAIN, (Compute.AUTO,) * 3, floor, Fuse.ALWAYS)
        situation = Situation("h100", BATCH, kernels=KERNELS, known=profile_of(*names), costs=costs_of(seed))
        plans = resolve(sites, [wanted] * len(sites), situation, {}, TracedNeighbours((names,), around))
        timings = [plan.timing for plan in plans if plan.timing is not None]
        assert len(timings) == len(sites)
        assert sum(each.chosen.us for each in timings) <= sum(each.as_is.us for each in timings) + 1e-2
        fp8.append({plan.site.name for plan in plans if plan.fp8})
    assert fp8[1] <= fp8[0]
