"""Whole plans of small models: what is bound where, what is refused and why, how layers share."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable

import pytest
import torch

from loka.graph.trace import tracer
from loka.plan.plan import NOTHING_AROUND, BindingKind, Plan
from loka.plan.planner import make_plan
from loka.plan.rewrite.rewrites import OUTSIDE
from loka.plan.serialize import to_json

MODELS = '''
import torch
from torch import nn
from torch.nn import functional as F


class Cross(nn.Module):
    """A GEMM on a Parameter, and a linear."""

    def __init__(self, width, branch=False):
        super().__init__()
        self.down = nn.Parameter(torch.randn(32, width) * 0.1)
        self.up = nn.Linear(32, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(self.up(F.linear(x, self.down)))


class ByRows(Cross):
    """Its forward is another for each number of rows."""

    def forward(self, x):
        scale = [1.0] * 1000
        return self.norm(self.up(F.linear(x * scale[x.size(0)], self.down)))


class Twice(nn.Module):
    """One Parameter at two places."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) * 0.1)

    def forward(self, x):
        x = F.linear(x, self.weight).relu()
        return F.linear(x, self.weight)


class Looped(Twice):
    """One Parameter at one place, called twice."""

    def forward(self, x):
        for _ in range(2):
            x = F.linear(x, self.weight).relu()
        return x


class Borrower(nn.Module):
    def forward(self, x, weight):
        return F.linear(x, weight)


class Lender(nn.Module):
    """Its Parameter is multiplied by in a child's forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) * 0.1)
        self.child = Borrower()

    def forward(self, x):
        return self.child(x, self.weight)


class Stack(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.enter = nn.Linear(64, 64)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def crosses():
    return Stack(*[Cross(64) for _ in range(4)])


def by_rows():
    return Stack(Cross(64), ByRows(64))


def twice():
    return Stack(Twice())


def looped():
    return Stack(Looped())


def lender():
    return Stack(Lender())


def unlike():
    return Stack(nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 64), nn.Linear(64, 64))


def example_inputs(batch_size):
    return (torch.randn(batch_size, 64),)
'''

MakePlan = Callable[..., Plan]


@pytest.fixture
def plan_for(write_module) -> MakePlan:
    """Plans a model of MODELS under some rules."""
    folder = write_module("planmodels", MODELS)

    def make(factory: str, rules: str = "") -> Plan:
        model = f'{{factory: "planmodels:{factory}", batch_size: 32}}'
        text = f"version: 1\nname: p\nmodel: {model}\ndefaults: {{compute: fp8}}\n"
        if rules:
            text += "rules:\n" + textwrap.indent(textwrap.dedent(rules), "  ")
        (folder / "p.yaml").write_text(text)
        return make_plan("p.yaml")

    return make


def site(plan: Plan, name: str):
    return next(each for each in plan.sites if each.site.name == name)


def test_layers_that_are_alike_share_a_class_and_are_traced_once(plan_for, monkeypatch):
    traced = []
    original = tracer.trace_forward

    def counted(module, owner, *args, **kwargs):
        traced.append(owner)
        return original(module, owner, *args, **kwargs)

    monkeypatch.setattr(tracer, "trace_forward", counted)
    plan = plan_for("crosses")
    assert traced == ["layers.0"]
    enter, layers, up, head = plan.bindings
    assert enter.name == "Enter"
    assert (layers.name, layers.kind) == ("Layers", BindingKind.FORWARD)
    assert layers.modules == tuple(f"layers.{i}" for i in range(4))
    assert layers.sites == tuple((f"layers.{i}.down",) for i in range(4))
    assert layers.module_type == "planmodels.Cross"
    assert ("down", (32, 64)) in layers.shapes
    assert (up.name, up.kind, up.modules) == ("LayersUp", BindingKind.LINEAR, tuple(f"layers.{i}.up" for i in range(4)))
    assert up.shapes == (("weight", (64, 32)), ("bias", (64,)))
    assert head.name == "Head"


def test_every_fp8_site_is_bound_exactly_once(plan_for):
    for rules in ("", '- {match: "layers.*", fuse: always}\n'):
        plan = plan_for("crosses", rules)
        bound = [name for binding in plan.bindings for sites in binding.sites for name in sites]
        assert sorted(bound) == sorted(each.site.name for each in plan.sites if each.fp8)


def test_a_fused_linear_is_inlined_into_its_owner(plan_for):
    plan = plan_for("crosses", '- {match: "layers.*", fuse: always}\n')
    _, layers, head = plan.bindings
    assert layers.sites[1] == ("layers.1.down", "layers.1.up")
    assert layers.forward is not None
    assert set(layers.forward.inlined) == {"up", "norm"}
    assert [region.site for region in layers.forward.regions] == ["layers.0.up"]
    assert site(plan, "layers.3.up").region == ("linear", "layer_norm")
    assert site(plan, "layers.3.down").region_note == NOTHING_AROUND
    assert head.modules == ("head",)


def test_layers_under_different_rules_do_not_share(plan_for):
    plan = plan_for("crosses", '- {match: "layers.2.*", wgrad: {compute: keep}}\n')
    assert [binding.modules for binding in plan.bindings if binding.kind is BindingKind.FORWARD] == [
        ("layers.0", "layers.1", "layers.3"),
        ("layers.2",),
    ]
    assert [len({binding.name for binding in plan.bindings}), len(plan.bindings)] == [6, 6]


def test_a_kept_call_in_an_owner_is_no_site_of_its_binding(plan_for):
    plan = plan_for("crosses", '- {match: "layers.*.up", fuse: always}\n- {match: "layers.*.down", compute: keep}\n')
    layers = plan.bindings[1]
    assert layers.sites[0] == ("layers.0.up",)
    assert layers.forward is not None
    assert sum(step.call is not None for step in layers.forward.statements) == 1


def test_linears_share_by_shape_bias_and_whether_they_have_a_dgrad(plan_for):
    plan = plan_for("unlike")
    assert [binding.modules for binding in plan.bindings] == [
        ("enter",),  # its input needs no gradient
        ("layers.0", "layers.2", "layers.3"),
        ("layers.1",),  # no bias
        ("head",),
    ]
    assert plan.bindings[2].shapes == (("weight", (64, 64)),)


def test_a_refused_owner_is_reported_and_its_linears_are_patched_one_by_one(plan_for):
    plan = plan_for("by_rows")
    (skipped,) = plan.skipped
    assert skipped.owner == "layers.1"
    assert "planmodels.py:" in skipped.reason
    assert skipped.share == pytest.approx(site(plan, "layers.1.down").site.share)
    assert not site(plan, "layers.1.down").fp8
    assert {gemm.reason for gemm in site(plan, "layers.1.down").gemms} == {skipped.reason}
    assert site(plan, "layers.1.up").fp8
    assert any("layers.1.up" in binding.modules for binding in plan.bindings)
    assert site(plan, "layers.0.down").fp8


def test_a_refused_region_is_noted_and_its_linear_still_patched(plan_for):
    plan = plan_for("by_rows", '- {match: "layers.*.up", fuse: always}\n- {match: "layers.*.down", compute: keep}\n')
    assert [(skipped.owner, skipped.share) for skipped in plan.skipped] == [("layers.1", 0)]
    assert site(plan, "layers.1.up").region == ()
    assert "planmodels.py:" in site(plan, "layers.1.up").region_note
    assert any("layers.1.up" in binding.modules for binding in plan.bindings)


@pytest.mark.parametrize(("factory", "calls"), [("twice", [1, 1]), ("looped", [2])])
def test_one_parameter_is_a_site_at_each_place(factory, calls, plan_for):
    plan = plan_for(factory)
    found = [each for each in plan.sites if each.site.weight == "layers.0.weight"]
    assert [each.site.calls for each in found] == calls
    assert all(each.fp8 for each in found)
    assert plan.bindings[1].sites == (tuple(each.site.name for each in found),)


def test_a_borrowed_parameter_stays_with_the_reason(plan_for):
    plan = plan_for("lender")
    (lent,) = [each for each in plan.sites if each.site.weight == "layers.0.weight"]
    assert not lent.fp8
    assert {gemm.reason for gemm in lent.gemms} == {lent.site.blocked or OUTSIDE}
    assert [binding.modules for binding in plan.bindings] == [("enter",), ("head",)]


@pytest.mark.slow
def test_ten_thousand_sites_are_decided_and_written_in_a_moment(make_site, make_settings):
    from torch import nn

    from loka.plan.decide import Situation
    from loka.plan.resolve import resolve
    from loka.plan.rewrite.plan_bindings import bind

    names = [f"blocks.{i}.linear" for i in range(10_000)]
    sites = [make_site(name, share=1e-4, k=8, n=8) for name in names]
    model = nn.ModuleDict({"blocks": nn.ModuleList()})
    linear = nn.Linear(8, 8)
    for _ in names:
        block = nn.Module()
        block.add_module("linear", linear)
        model["blocks"].append(block)
    settings = make_settings()
    start = time.perf_counter()
    plans = resolve(sites, [settings] * len(sites), Situation("h100", 4096), {})
    bindings = bind(plans, {}, model)
    text = to_json(Plan(name="p", target="h100", batch_size=4096, policy_files=(), sites=plans, bindings=bindings))
    seconds = time.perf_counter() - start
    assert [len(binding.modules) for binding in bindings] == [10_000]
    assert len(text) < 6_000_000
    assert seconds < 5  # 0.4 s on a quiet machine


def test_a_kept_linear_is_fused_only_where_the_policy_says_so(plan_for):
    kept = '- {match: "layers.*", compute: keep}\n'
    assert not any(binding.modules[0].startswith("layers") for binding in plan_for("crosses", kept).bindings)
    plan = plan_for("crosses", kept + '- {match: "layers.*", fuse: always}\n')
    _, layers, _ = plan.bindings
    assert layers.modules == tuple(f"layers.{number}" for number in range(4))
    assert site(plan, "layers.0.up").region == ("linear", "layer_norm")
    assert not site(plan, "layers.0.up").fp8
    assert (site(plan, "layers.0.down").region, site(plan, "layers.0.down").region_note) == ((), NOTHING_AROUND)


def test_a_refused_region_of_a_kept_linear_changes_no_share(plan_for):
    plan = plan_for("by_rows", '- {match: "layers.*", compute: keep, fuse: always}\n')
    assert [(skipped.owner, skipped.share) for skipped in plan.skipped] == [("layers.1", 0)]
    assert {gemm.reason for gemm in site(plan, "layers.1.down").gemms} == {"keep by p.yaml:6"}
    assert "planmodels.py:" in site(plan, "layers.1.up").region_note
    assert site(plan, "layers.0.up").region == ("linear", "layer_norm")


def test_planning_runs_torch_with_one_thread(tmp_path, monkeypatch):
    """Several would wait for one another, for minutes where the cores are busy."""
    (tmp_path / "counted.py").write_text(
        "import torch\n\n\nSEEN = []\n\n\nclass Model(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.up, self.norm = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)\n\n"
        "    def forward(self, x):\n        return self.norm(self.up(x))\n\n\n"
        "def example_inputs(batch):\n    SEEN.append(torch.get_num_threads())\n    return torch.randn(batch, 64)\n",
        encoding="utf-8",
    )
    (tmp_path / "counted.yaml").write_text(
        'version: 1\nname: counted\nmodel: {factory: "counted:Model", batch_size: 64}\n', encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        make_plan("counted.yaml")
        assert set(sys.modules.pop("counted").SEEN) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
