"""Plans of a whole model by measurements: chains as they are traced, the file of times, and the same bytes anywhere."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from loka.codegen.package_text import render_package
from loka.graph.trace.tracer import Tracer
from loka.kernels.measurements.parts import Part, PartKind
from loka.mods.policy_loader import load_policy
from loka.numerics.enums import Fuse, Gemm
from loka.plan import planner
from loka.plan.decide import Situation
from loka.plan.evidence import ProfiledSites
from loka.plan.examine import Examined, examine, tracer_of
from loka.plan.plan import Plan, SitePlan
from loka.plan.plan_of import plan_of
from loka.plan.planner import make_plan
from loka.plan.resolve import resolve
from loka.plan.select.perf_model import PerfModel
from loka.plan.select.workload import SiteSizes, native_part
from loka.plan.serialize import to_json
from loka.plan.totals import total_time
from loka.plan.view.diff import diff
from loka.probe.profile.profile import Profile, SiteProfile
from tests.support.cores import slowness
from tests.support.plan.plan_costs import SAFE_CHAIN, SCALED_MM, MadeUp, Remembering

pytestmark = pytest.mark.slow

MODEL = """
import torch
from torch import nn


class Tower(nn.Module):
    def __init__(self, *widths):
        super().__init__()
        self.norm = nn.LayerNorm(widths[0])
        layers = []
        for k, n in zip(widths, widths[1:]):
            layers += [nn.Linear(k, n), nn.LayerNorm(n), nn.SiLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(48, 512)
        self.tower = Tower(512, 512, 64, 512)

    def forward(self, x):
        return self.tower(self.enter(x))


def build():
    return Model()


def inputs(batch_size):
    return (torch.randn(batch_size, 48),)
"""
POLICY = """\
version: 1
name: tower
model: {factory: "timedmodel:build", inputs: "timedmodel:inputs", batch_size: 8192}
defaults: {compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: FUSE}
rules:
  - {match: "enter", compute: keep}
"""
FIRST, SECOND, THIRD = (f"tower.layers.{place}" for place in (0, 3, 6))

PlanFor = Callable[..., Plan]


@pytest.fixture
def folder(write_module) -> Path:
    return write_module("timedmodel", MODEL)


EXAMINED: dict[str, tuple[Examined, Tracer]] = {}  # by the policy's text


@pytest.fixture
def plan_for(folder: Path) -> PlanFor:
    """The plan of the tower by made-up costs; it is examined and traced once for a policy."""

    def make(costs: MadeUp | None, fuse: str = "always", rules: str = "") -> Plan:
        text = POLICY.replace("FUSE", fuse) + rules
        (folder / "p.yaml").write_text(text)
        if text not in EXAMINED:
            found = examine(load_policy("p.yaml"))
            EXAMINED[text] = found, tracer_of(found)
        found, tracer = EXAMINED[text]
        return plan_of(found, None, costs, tracer=tracer)

    return make


def site(plan: Plan, name: str) -> SitePlan:
    return next(each for each in plan.sites if each.site.name == name)


def forward_of(plan: Plan, name: str) -> float:
    timing = site(plan, name).timing
    assert timing is not None
    return timing.chosen.forward


def test_a_site_that_is_kept_breaks_the_chain_and_its_neighbour_pays(plan_for: PlanFor) -> None:
    whole = plan_for(MadeUp())
    broken = plan_for(MadeUp(), rules=f'  - {{match: "{SECOND}", compute: keep}}\n')
    assert [each.fp8 for each in whole.sites] == [False, True, True, True]
    assert forward_of(whole, FIRST) == forward_of(broken, FIRST)
    assert site(whole, SECOND).timing.as_is == site(broken, SECOND).timing.as_is
    assert forward_of(whole, THIRD) < forward_of(broken, THIRD)
    assert site(broken, SECOND).region == ("linear", "layer_norm", "silu")  # in the model's dtype, by kernels too


def safe_everywhere() -> ProfiledSites:
    """A profile in which the transposed recipe is safe at every site of the tower."""
    sizes = {"enter": (48, 512), FIRST: (512, 512), SECOND: (512, 64), THIRD: (64, 512)}
    sites = tuple(SiteProfile(name, k, n, 8192, (), SAFE_CHAIN) for name, (k, n) in sizes.items())
    return ProfiledSites.of(Profile("p", "timedmodel:build", "0", "2026-01-01T00:00:00Z", 10, 1, 10, 8192, sites, ()))


@pytest.mark.parametrize("chained", [True, False])
def test_what_bf16_is_faster_for_is_fused_in_bf16(chained: bool, folder: Path) -> None:
    """The product of the narrow linear in the middle is slow in FP8: more than its neighbours gain by it."""

    def factor(part: Part) -> float:
        narrow = part.work is PartKind.GEMM and 64 in (part.columns, part.contraction, part.rows)
        return 1.0 if "e4m3" not in part.recipe else 20.0 if narrow and not chained else 0.5

    text = POLICY.replace("FUSE", "always").replace("compute: fp8", "compute: auto")
    (folder / "p.yaml").write_text(text)
    plan = plan_of(examine(load_policy("p.yaml")), safe_everywhere(), MadeUp(factor=factor))
    assert [each.fp8 for each in plan.sites] == ([False, True, True, True] if chained else [False, True, False, False])
    second = site(plan, SECOND)
    assert second.region == ("linear", "layer_norm", "silu")
    assert second.region_note == ""
    kept = {gemm.reason.partition(":")[0] for gemm in second.gemms}
    assert kept == ({"safe by evidence and faster, auto by p.yaml"} if chained else {"kept"})
    assert second.timing is not None
    assert second.timing.kept is not chained
    files = render_package(plan)
    assert "e4m3" in files["kernels.py"]
    plain = files["fused.py"].partition("\nadd_layer_norm_silu = ")[2].partition("\n\n")[0]  # in bf16
    assert re.findall(r"(\d+): Rows\(", plain) == (["512"] if chained else ["64", "512"])


def test_the_norms_around_are_counted_once(plan_for: PlanFor) -> None:
    costs = Remembering()
    plan = plan_for(costs)
    total = total_time(plan)
    assert total is not None
    perf_model = PerfModel(costs)
    around = ((512, "layer_norm"), (512, "layer_norm silu"), (64, "layer_norm silu"), (512, "layer_norm silu"))
    norms = [
        Part(work, "compiled", 8192, width, recipe="bfloat16", around=words)
        for width, words in around
        for work in (PartKind.FORWARD, PartKind.BACKWARD)
    ]
    products = [
        native_part(gemm.gemm, SiteSizes(8192, each.site.k, each.site.n)) for each in plan.sites for gemm in each.gemms
    ]
    expected = perf_model.sum((*norms, *products))
    assert expected is not None
    enter = site(plan, "enter")
    assert enter.timing is not None
    assert total.as_is_us == pytest.approx(expected.us, abs=0.01)


def test_fuse_auto_traces_and_takes_the_neighbours_where_that_gains(plan_for: PlanFor) -> None:
    without = plan_for(None, "auto")
    assert {each.region for each in without.sites} == {()}
    plan = plan_for(MadeUp(), "auto")
    assert site(plan, FIRST).gains_by_fusing
    assert site(plan, "enter").region == ("linear", "layer_norm")  # in the model's dtype
    assert site(plan, FIRST).region == ("linear", "layer_norm", "silu")
    assert any(FIRST in sites for binding in plan.bindings for sites in binding.sites)
    slow = MadeUp(factor=lambda part: 5.0 if part.around and "e4m3" in part.recipe else 1.0)
    regions = {each.site.name: each.region for each in plan_for(slow, "auto").sites}
    assert regions == {"enter": ("linear", "layer_norm"), FIRST: (), SECOND: (), THIRD: ()}
    assert {each.region for each in plan_for(MadeUp(), "never").sites} == {()}


def test_the_plan_names_its_measurements_and_differs_from_that_without(plan_for: PlanFor) -> None:
    bare, plan = plan_for(None), plan_for(MadeUp())
    assert (bare.measurements, plan.measurements) == (None, ("made-up.jsonl", "c" * 64))
    change = diff(bare, plan)
    assert change.same
    assert [each.site for each in change.times] == ["enter", FIRST, SECOND, THIRD]
    assert change.total_us[0] is None
    assert change.measurements == ("", "made-up.jsonl (cccccccc)")
    other = plan_for(MadeUp({"as-is": 1.0, SCALED_MM: 1.0, "fbgemm.rowwise": 0.9}))
    kernels = diff(plan, other)
    assert not kernels.same
    assert {(each.gemm, each.after) for each in kernels.gemms if each.site == FIRST} == {
        (Gemm.FPROP, "e4m3 rowwise pow2 by fbgemm.rowwise"),
        (Gemm.DGRAD, "grad_output e4m3 rowwise pow2, weight e4m3 transposed by fbgemm.rowwise"),
        (Gemm.WGRAD, "e4m3 transposed by fbgemm.rowwise"),
    }


@pytest.fixture
def measured(folder: Path, plan_for: PlanFor) -> Path:
    """A policy that names a file with the times of every part that its plan asks for."""
    costs = Remembering(kernels={"as-is": 1.0, SCALED_MM: 1.0, "fbgemm.rowwise": 0.9})
    plan_for(costs)
    costs.record(folder / "times.jsonl")
    text = (folder / "p.yaml").read_text().replace("defaults:", "measurements: times.jsonl\ndefaults:")
    (folder / "p.yaml").write_text(text)
    return folder / "p.yaml"


def test_a_file_of_times_decides_as_the_costs_that_it_was_made_of(measured: Path) -> None:
    plan = make_plan(measured.name)
    assert plan.measurements is not None
    assert plan.measurements[0] == "times.jsonl"
    assert {gemm.kernel for gemm in site(plan, FIRST).gemms} == {"fbgemm.rowwise"}
    for each in site(plan, FIRST).options:  # in a mixture the compiler writes the norms, which nothing measures
        assert each.time.source.value == ("measured" if each.fused else "estimated")


def test_ranks_that_plan_apart_reach_the_same_bytes(measured: Path) -> None:
    """This process's hash seed and another's."""
    code = "from loka.plan import planner, serialize; print(serialize.to_json(planner.make_plan('p.yaml')))"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    another = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
    )
    text = to_json(make_plan(measured.name))
    assert another.stdout.decode() == f"{text}\n"


@pytest.mark.timing
def test_a_thousand_unlike_sites_are_planned_in_two_seconds(make_site, chain_settings) -> None:
    wanted = chain_settings(fuse=Fuse.AUTO)
    sites = [make_site(f"layers.{i}.up", k=16 * (1 + i % 100), n=64 * (1 + i // 100)) for i in range(1000)]
    gc.disable()  # as a plan is made
    start = time.process_time()
    plans = resolve(sites, [wanted] * len(sites), Situation("h100", 4096, costs=MadeUp()), {})
    head = {"name": "p", "target": "h100", "batch_size": 4096, "policy_files": (), "bindings": ()}
    text = to_json(Plan(**head, sites=plans, measurements=("made-up", "")))
    seconds = time.process_time() - start
    gc.enable()
    assert all(plan.timing is not None for plan in plans)
    assert len(json.loads(text)["timings"]) == 1000
    assert seconds < 2 * slowness()


def test_the_set_that_ships_asks_for_no_further_library(plan_for: PlanFor, folder: Path, monkeypatch) -> None:
    """Who names measurements has what they were taken with; who does not may have torch alone."""
    costs = MadeUp({"as-is": 1.0, SCALED_MM: 1.0, "fbgemm.rowwise": 0.5})
    assert {gemm.kernel for gemm in site(plan_for(costs), FIRST).gemms} == {"fbgemm.rowwise"}
    monkeypatch.setattr(planner, "open_measurements", lambda policy: costs)
    assert {gemm.kernel for gemm in site(make_plan("p.yaml"), FIRST).gemms} == {SCALED_MM}
    (folder / "p.yaml").write_text((folder / "p.yaml").read_text() + '  - {match: "*.0", kernel: fbgemm.rowwise}\n')
    assert site(make_plan("p.yaml"), FIRST).gemms[0].kernel == "fbgemm.rowwise"
