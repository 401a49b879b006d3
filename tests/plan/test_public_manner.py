"""Plans of small models in the manner of public recommenders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from loka.plan.plan import NOTHING_AROUND, Plan, SitePlan
from loka.plan.planner import make_plan
from loka.plan.view.explain import explain

MODELS = "tests.support.models.public_manner"
FUSED = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always"

PlanFor = Callable[..., Plan]


@pytest.fixture
def plan_for(tmp_path: Path) -> PlanFor:
    """The plan of a model of `public_manner`, everything in FP8 and fused."""

    def make(factory: str, inputs: str = "rows", more: str = "") -> Plan:
        model = f'{{factory: "{MODELS}:{factory}", inputs: "{MODELS}:{inputs}", batch_size: 64}}'
        policy = tmp_path / "p.yaml"
        policy.write_text(f"version: 1\nname: p\nmodel: {model}\ndefaults: {{{FUSED}}}\n{more}")
        return make_plan(policy)

    return make


def site(plan: Plan, name: str) -> SitePlan:
    return next(each for each in plan.sites if each.site.name == name)


def test_regions_inside_a_refused_module_are_fused_as_if_it_were_not_there(plan_for):
    plan = plan_for("BranchingModel")
    assert [(skipped.owner, skipped.reason.split(" at ")[0]) for skipped in plan.skipped] == [
        ("", "branch on a tensor's value")
    ]
    (tower, _) = plan.bindings
    assert (tower.modules, tower.sites) == (("tower",), (("tower.0", "tower.3"),))
    assert site(plan, "tower.0").region == ("linear", "layer_norm", "silu")
    assert site(plan, "tower.3").region == ("linear", "relu")
    assert site(plan, "head").region_note == NOTHING_AROUND


def test_regions_around_a_refused_child_are_fused_and_those_inside_it(plan_for):
    plan = plan_for("AroundABranch")
    assert plan.skipped == ()  # the layer's own statements would only make a chain longer
    forwards = {binding.modules[0]: binding.forward for binding in plan.bindings}
    assert set(forwards) == {"", "layer.tower"}
    assert "layer" in forwards[""].called
    assert site(plan, "enter").region == site(plan, "leave").region == ("linear", "layer_norm", "relu")
    assert site(plan, "layer.tower.0").region == ("linear", "layer_norm")


def test_a_batch_norm_ends_a_region_and_explain_says_why(plan_for):
    plan = plan_for("BatchNormTower")
    first, second = (explain(plan, f"linears.{number}") for number in range(2))
    assert (first.found.region, len(first.region_ends)) == ((), 1)
    assert first.region_ends[0].startswith("BatchNorm 'bn.0' after it: in training its statistics")
    after, before = second.region_ends
    assert after.startswith("BatchNorm 'bn.1' after it: ")
    assert before.startswith("dropout 'dropout' before it: in training it draws random numbers")


def test_a_dropout_ends_a_region_behind_what_it_takes_along(plan_for):
    plan = plan_for("dropout_tower")
    first, head = explain(plan, "0"), explain(plan, "3")
    assert first.found.region == ("linear", "relu")
    assert [text.partition(":")[0] for text in first.region_ends] == ["dropout '2' after it"]
    assert [text.partition(":")[0] for text in head.region_ends] == ["dropout '2' before it"]


def test_identities_and_dropouts_of_zero_are_no_part_of_a_forward(plan_for):
    plan = plan_for("idle_tower")
    assert [each.region for each in plan.sites] == [("linear", "relu"), ("linear", "layer_norm", "relu"), ()]
    (binding,) = plan.bindings  # one chain
    assert binding.forward is not None
    assert [step.op for step in binding.forward.statements] == [
        "linear", "relu", "linear", "layer_norm", "relu", "linear",
    ]  # fmt: skip
    assert not any(explain(plan, each.site.name).region_ends for each in plan.sites)


def test_fuse_interaction_lists_only_what_nearly_is_an_interaction(plan_for):
    (mod,) = plan_for("NoInteraction", more="mods: [{use: fuse_interaction, optional: true}]\n").mods
    assert [(each.name, each.reason) for each in mod.unchanged] == [
        ("block", "the sum before its norm has 2 dimensions, not 3 (samples, rows, columns)")
    ]
