"""Plans of a whole model by measurements: chains as they are traced, the file of times, and the same bytes anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from plan_costs import CHAIN, SCALED_MM, MadeUp

from loka.kernels.measurements import Measurement, Recording, Versions
from loka.kernels.parts import Part, Work
from loka.numerics.names import Compute, Fuse, Gemm
from loka.plan.costs import Sizes, as_is_part
from loka.plan.diff import diff
from loka.plan.make import examine, make_plan, plan_of
from loka.plan.plan import Plan, SitePlan, Target
from loka.plan.pricing import Pricer
from loka.plan.resolve import Situation, resolve
from loka.plan.serial import from_json, to_json
from loka.plan.summary import total_time
from loka.policy.load import load_policy
from loka.policy.settings import Budget, GemmSettings

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
defaults: {compute: fp8, scaling: rowwise, power_of_two: true, turned: true, fuse: FUSE}
rules:
  - {match: "enter", compute: keep}
"""
HOPPER = Versions("NVIDIA H100 80GB HBM3", "9.0", "575.57.08", "13.0", "13.0.2", "2.11.0", "3.6.0", "")
FIRST, SECOND, THIRD = (f"tower.layers.{place}" for place in (0, 3, 6))

PlanFor = Callable[..., Plan]


class Remembering(MadeUp):
    """Costs that remember what was asked."""

    def __init__(self, **changes: object) -> None:
        super().__init__(**changes)
        self.parts: dict[Part, None] = {}

    def time(self, part: Part):
        self.parts[part] = None
        return super().time(part)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "timedmodel.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    sys.modules.pop("timedmodel", None)
    yield tmp_path
    sys.modules.pop("timedmodel", None)


@pytest.fixture
def plan_for(folder: Path) -> PlanFor:
    """The plan of the tower by made-up costs."""

    def make(costs: MadeUp | None, fuse: str = "always", rules: str = "") -> Plan:
        (folder / "p.yaml").write_text(POLICY.replace("FUSE", fuse) + rules)
        return plan_of(examine(load_policy("p.yaml")), None, costs)

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


def test_the_norms_around_are_counted_once(plan_for: PlanFor) -> None:
    costs = Remembering()
    plan = plan_for(costs)
    total = total_time(plan)
    assert total is not None
    pricer = Pricer(costs)
    around = ((512, "layer_norm"), (512, "layer_norm silu"), (64, "layer_norm silu"), (512, "layer_norm silu"))
    norms = [
        Part(work, "rendered", 8192, width, recipe="bfloat16", around=words)
        for width, words in around
        for work in (Work.FORWARD, Work.BACKWARD)
    ]
    products = [
        as_is_part(gemm.gemm, Sizes(8192, each.site.k, each.site.n)) for each in plan.sites for gemm in each.gemms
    ]
    expected = pricer.sum((*norms, *products))
    assert expected is not None
    enter = site(plan, "enter")
    assert enter.timing is not None
    assert total.as_is_us == pytest.approx(expected.us, abs=0.01)


def test_fuse_auto_traces_and_takes_the_neighbours_where_that_gains(plan_for: PlanFor) -> None:
    without = plan_for(None, "auto")
    assert {each.region for each in without.sites} == {()}
    plan = plan_for(MadeUp(), "auto")
    assert site(plan, FIRST).gains_by_fusing
    assert site(plan, FIRST).region == ("layer_norm", "linear", "layer_norm", "silu")
    assert any("tower" in binding.modules for binding in plan.bindings)
    slow = MadeUp(factor=lambda part: 5.0 if part.around and "e4m3" in part.recipe else 1.0)
    assert {each.region for each in plan_for(slow, "auto").sites} == {()}
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
        (Gemm.DGRAD, "grad_output e4m3 rowwise pow2, weight e4m3 turned by fbgemm.rowwise"),
    }


@pytest.fixture
def measured(folder: Path, plan_for: PlanFor) -> Path:
    """A policy that names a file with the times of every part that its plan asks for."""
    costs = Remembering(kernels={"as-is": 1.0, SCALED_MM: 1.0, "fbgemm.rowwise": 0.9})
    plan_for(costs)
    with Recording(folder / "times.sqlite", lambda kernel: HOPPER) as recording:
        for part in list(costs.parts):
            timed = costs.time(part)
            if timed is not None:
                error = costs.error(part) if part.work is Work.GEMM and part.recipe else None
                recording.add(Measurement(part, timed.us, 0.005, 20, *(error or (None, None))))
    text = (folder / "p.yaml").read_text().replace("defaults:", "measurements: times.sqlite\ndefaults:")
    (folder / "p.yaml").write_text(text)
    return folder / "p.yaml"


def test_a_file_of_times_decides_as_the_costs_that_it_was_made_of(measured: Path) -> None:
    plan = make_plan(measured.name)
    assert plan.measurements is not None
    assert plan.measurements[0] == "times.sqlite"
    fprop, _, wgrad = site(plan, FIRST).gemms
    assert (fprop.kernel, wgrad.kernel) == ("fbgemm.rowwise", SCALED_MM)
    assert all(each.time.source.value == "measured" for each in site(plan, FIRST).candidates)
    assert from_json(to_json(plan)) == plan


def test_ranks_that_plan_apart_reach_the_same_bytes(measured: Path) -> None:
    code = "from loka.plan import make, serial; print(serial.to_json(make.make_plan('p.yaml')))"
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    assert json.loads(texts.pop())["version"] == 2


def test_a_thousand_unlike_sites_are_planned_in_two_seconds(make_site, make_settings) -> None:
    settings = make_settings(Compute.FP8)
    gemms = {gemm: GemmSettings(each.compute, CHAIN[gemm]) for gemm, each in settings.gemms.items()}
    wanted = replace(settings, gemms=gemms, fuse=Fuse.AUTO, budget=Budget())
    sites = [make_site(f"layers.{i}.up", k=16 * (1 + i % 100), n=64 * (1 + i // 100)) for i in range(1000)]
    start = time.perf_counter()
    plans = resolve(sites, [wanted] * len(sites), Situation(Target.H100, 4096, costs=MadeUp()), {})
    text = to_json(Plan("p", Target.H100, 4096, (), plans, (), measurements=("made-up", "")))
    seconds = time.perf_counter() - start
    assert all(plan.timing is not None for plan in plans)
    assert len(json.loads(text)["timings"]) == 1000
    assert seconds < 2
