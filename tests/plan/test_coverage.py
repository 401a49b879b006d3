"""Coverage of plans: shares of FLOPs and of predicted time, and the largest pieces that stay the compiler's."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

import pytest

from loka.bench.report.model_tree import model_tree
from loka.bench.report.tables import shortfalls
from loka.devices.targets import spec_of
from loka.errors import InputError
from loka.graph.sites.site import GemmKind, Opaque, RowCount
from loka.kernels.fused.kernel_values import LARGEST_WIDTH
from loka.kernels.measurements.part_bounds import bound_us
from loka.kernels.measurements.parts import PartKind, TimeSource
from loka.numerics.enums import Compute, Gemm
from loka.numerics.recipe import OperandRecipe
from loka.plan.plan import NATIVE, NOTHING_AROUND, InteractionPlan, KernelTime, SitePlan, SiteTiming, StepTime
from loka.plan.planner import make_plan
from loka.plan.select.workload import SiteSizes, native_part
from loka.plan.serialize import from_json, to_json
from loka.plan.view.coverage import (
    OPAQUE,
    coverage_of,
    in_fused_region,
)
from loka.plan.view.explain import explain
from loka.plan.view.table import group_sites
from loka.policy.settings import Assignment

CHAIN = OperandRecipe(power_of_two=True)
TRANSPOSED = replace(CHAIN, transposed=True)


def step(us: float) -> StepTime:
    return StepTime(us / 2, us / 2, TimeSource.MEASURED)


def timed(site: SitePlan, chosen: float, as_is: float, gemm: float = 10.0, **changes: object) -> SitePlan:
    """A site with times; each of its native GEMMs takes `gemm`."""
    times = (KernelTime(NATIVE, gemm, 0.0, TimeSource.MEASURED),)
    gemms = tuple(replace(each, times=times) for each in site.gemms)
    return replace(site, gemms=gemms, timing=SiteTiming(step(chosen), step(as_is), step(as_is)), **changes)


def chained(site: SitePlan) -> SitePlan:
    """The site with the operands of a chain."""
    operands = {
        Gemm.FPROP: (CHAIN, CHAIN),
        Gemm.DGRAD: (CHAIN, TRANSPOSED),
        Gemm.WGRAD: (TRANSPOSED, TRANSPOSED),
    }
    return replace(site, gemms=tuple(replace(each, operands=operands[each.gemm]) for each in site.gemms))


@pytest.fixture
def plan(make_plan, make_site):
    """Two sites in FP8 and one that is kept, with times."""
    first, second, head = make_plan(make_site("a"), make_site("b"), make_site("head", n=1, followed_by=())).sites
    kept = tuple(replace(each, operands=None, kernel=NATIVE, reason="keep by p.yaml:3") for each in head.gemms)
    sites = (
        timed(chained(first), 50.0, 100.0, region=("layer_norm", "linear")),
        timed(second, 40.0, 36.0),
        timed(replace(head, gemms=kept), 30.0, 30.0),
    )
    return make_plan(sites=sites, measurements=("times", "0" * 64))


def test_sites_alike_are_one_piece_and_three_are_named(make_plan, make_site, plan) -> None:
    *_, head = plan.sites
    names = [*(f"layers.{i}.mlp" for i in range(4)), "p", "q", "r"]
    sites = tuple(replace(head, site=replace(head.site, name=name)) for name in names)
    first, *others = coverage_of(replace(plan, sites=sites)).largest
    assert (first.name, first.count, first.us) == ("layers.*.mlp", 4, 120.0)
    assert [each.name for each in others] == ["p", "q"]
    assert first.words.startswith("layers.*.mlp (4 sites: fprop, ")


def test_reasons_that_differ_in_figures_alone_share_a_piece(plan) -> None:
    *_, head = plan.sites

    def kept(name: str, reason: str) -> SitePlan:
        gemms = tuple(replace(each, reason=reason) for each in head.gemms)
        return replace(head, site=replace(head.site, name=name), gemms=gemms)

    sites = (kept("l.0", "unsafe: MERE 0.26"), kept("l.1", "unsafe: MERE 0.31"), kept("l.2", "never ran"))
    found = coverage_of(replace(plan, sites=sites)).largest
    assert [(each.name, each.count) for each in found] == [("l.0, l.1", 2), ("l.2", 1)]


def test_an_interaction_counts_as_fused_and_its_sites_do_not_count_again(plan) -> None:
    interaction = InteractionPlan(
        PartKind.FM_INTERACTION, "", "a mixing layer", "", 4096, 32, 2, ("head",), step(7.0), None
    )
    time = coverage_of(replace(plan, interactions=(interaction,))).time
    assert (time.fused_us, time.compiler_us) == (64.0, 6.0)


def test_a_site_without_times_counts_with_the_least_time_of_its_gemms(plan) -> None:
    *others, head = plan.sites
    blocked = replace(head, site=replace(head.site, kind=GemmKind.BMM, blocked="no weight"), timing=None)
    found = coverage_of(replace(plan, sites=(*others, blocked)))
    device, sizes = spec_of(plan.target), SiteSizes(4096, 2048, 1)
    least = sum(bound_us(native_part(each.gemm, sizes), device) for each in blocked.gemms)
    assert found.time.compiler_us == pytest.approx(least + 6.0, abs=1e-3)
    assert found.time.bounded == 1
    assert "1 site without times counts with the least time that the device needs." in found.step_words
    assert found.largest[0].words.startswith("head (fprop, dgrad, wgrad): at least ")


def test_without_measurements_pieces_go_by_flops(plan) -> None:
    untimed = tuple(replace(site, timing=None) for site in plan.sites)
    found = coverage_of(replace(plan, sites=untimed, measurements=None))
    assert found.time is None
    (head,) = found.largest
    assert (head.name, head.us) == ("head", None)
    assert head.share == pytest.approx(1 / 2049, abs=1e-4)
    assert len(found.rows) == 2
    assert "goes by GEMM FLOPs" in found.step_words


def test_inference_counts_the_forward_of_an_evaluation(make_plan, make_site, make_settings) -> None:
    settings = make_settings(Compute.FP8, fprop=Compute.KEEP)
    kept = make_plan(make_site("a"), settings=settings).sites
    fp8 = make_plan(make_site("b", calls_eval=3)).sites
    found = coverage_of(make_plan(sites=(*kept, *fp8)))
    assert found.flops_inference == pytest.approx(0.75)
    assert found.flops_training == pytest.approx(5 / 6)


def test_norms_that_end_the_fused_region_before_a_site_are_not_the_compilers(plan) -> None:
    first, _, head = plan.sites
    first = replace(first, region=("linear", "layer_norm", "silu"))
    reads = replace(head, site=replace(head.site, fed_by=("silu", "layer_norm", "linear")))
    reads = timed(reads, 38.0, 38.0)
    time = coverage_of(replace(plan, sites=(first, reads))).time
    assert (time.fused_us, time.compiler_us) == (58.0, 30.0)


@pytest.mark.parametrize(
    ("region", "note", "fuse", "fused"),
    [
        (("linear", "silu"), "", "auto", True),
        ((), "", "always", True),  # inside a chain
        ((), "", "never", False),
        ((), NOTHING_AROUND, "always", False),
    ],
)
def test_a_site_is_fused_if_kernels_compute_its_neighbours(region, note, fuse, fused, plan) -> None:
    first, other, head = plan.sites
    history = {"fuse": (Assignment("fuse", fuse, "defaults", "p.yaml", 3),)}
    changes = {"region": region, "region_note": note, "history": history}
    assert in_fused_region(plan, replace(first, **changes)) is fused
    assert not in_fused_region(plan, replace(other, **changes))  # another recipe: torch's own operations
    assert in_fused_region(plan, replace(head, **changes)) is bool(region)
    wide = replace(first.site, k=LARGEST_WIDTH + 1)
    assert not in_fused_region(plan, replace(first, site=wide, **changes))


def test_an_empty_model_has_no_coverage(make_plan) -> None:
    found = coverage_of(make_plan())
    assert (found.flops_training, found.flops_inference, found.time, found.largest) == (0.0, 0.0, None, ())


def test_rounded_times_are_no_norms(plan) -> None:
    *_, head = plan.sites
    (piece,) = coverage_of(replace(plan, sites=(timed(head, 30.002, 30.002),))).largest
    assert piece.what == "fprop, dgrad, wgrad"
    assert piece.reason == "keep by p.yaml:3"


GRU = Opaque("gru", ("tower.gru",), 1, RowCount(1 << 20), share=0.75, share_eval=0.5)


def test_opaque_products_count_in_the_shares_of_flops(make_plan, make_site):
    """One site in FP8 with a quarter of the FLOPs, beside a recurrent layer."""
    alone = make_plan(make_site("a", share=0.25), measurements=None)
    assert alone.share_fp8 == coverage_of(alone).flops_inference == 1
    plan = replace(alone, opaque=(GRU,))
    assert plan.share_fp8 == coverage_of(plan).flops_training == pytest.approx(0.25)
    assert coverage_of(plan).flops_inference == pytest.approx(0.5)
    (piece,) = coverage_of(plan).largest
    flops = 3 * (1 << 20) * plan.batch_size
    own = plan.sites[0].site
    whole = flops + 3 * own.flops_per_row * own.rows.at(plan.batch_size)
    assert (piece.name, piece.reason, piece.share) == ("gru of tower.gru", OPAQUE, round(flops / whole, 4))


def test_opaque_products_take_the_least_time_of_the_device(plan):
    without, found = coverage_of(plan), coverage_of(replace(plan, opaque=(GRU,)))
    us = 1e6 * 3 * (1 << 20) * plan.batch_size / spec_of(plan.target).flops["bfloat16"]
    assert found.time.us == pytest.approx(without.time.us + us, abs=0.01)
    piece = next(each for each in found.largest if each.name == "gru of tower.gru")
    assert (piece.us, piece.at_least) == (pytest.approx(us, abs=0.01), True)


def test_a_plan_keeps_its_opaque_products(plan):
    opaque = replace(plan, opaque=(GRU,))
    assert from_json(to_json(opaque)) == opaque
    with pytest.raises(InputError, match="the share of 'gru' cannot be"):
        from_json(to_json(replace(plan, opaque=(replace(GRU, share=1.5),))))


def test_a_model_that_is_a_recurrent_layer_is_not_in_fp8(write_module):
    folder = write_module(
        "recurrent",
        dedent("""
        import torch
        from torch import nn

        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.gru, self.head = nn.GRU(64, 64, batch_first=True), nn.Linear(64, 16)

            def forward(self, x):
                return self.head(self.gru(x)[0][:, -1])

        def example_inputs(batch_size):
            return (torch.randn(batch_size, 20, 64),)
        """),
    )
    model = '{factory: "recurrent:Recurrent", batch_size: 32}'
    (folder / "p.yaml").write_text(f"version: 1\nname: p\nmodel: {model}\ndefaults: {{compute: fp8}}\n")
    plan = make_plan("p.yaml")
    assert plan.sites[0].fp8
    assert plan.share_fp8 < 0.01
    assert [shortfall for shortfall in shortfalls(plan, group_sites(plan, alike=True)) if "gru" in shortfall] == [
        "not replaced: gru in 'gru', 99.8 % of the FLOPs"
    ]
    tree = model_tree(plan)
    assert (tree[-1].label, tree[-1].share) == ("gru", pytest.approx(1 - plan.share_fp8, abs=0.001))
    assert sum(node.share for node in tree) == pytest.approx(1)
    assert explain(plan, "head").found.site.share == pytest.approx(1 - plan.opaque[0].share)
