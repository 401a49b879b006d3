"""What all-gathers and TorchRec's exchanges carry by a plan, with reasons and bytes; the same as generated code can."""

from __future__ import annotations

import importlib
import json

import pytest

import loka
from loka.errors import Code
from loka.plan.communication import communication_lines
from loka.plan.resolve import ImpossibleRuleError
from loka.plan.serialize import from_json, to_json
from loka.plan.view.diff import diff
from loka.plan.view.explain import explain
from tests.support import guide_pages
from tests.support.models import sharded_models as models

COPIES = "its recipe reads more than one FP8 copy of the weight, or a scale of the whole weight"
NATIVE = "its GEMMs stay in the model's dtype"
UNSAID = [each for each in models.PACKAGES if "communication" not in each[2]]


@pytest.fixture
def policy(tmp_path):
    """The path of a policy with this `communication:`, "" for none."""

    def write(communication, name="sent", factory="tower", rules=""):
        text = models.POLICY.format(name=name, factory=factory, rules=rules)
        section = f"communication: {communication}\ntarget:" if communication else "target:"
        path = tmp_path / f"{name}.yaml"
        path.write_text(text.replace("target:", section))
        return path

    return write


@pytest.fixture
def planned(policy):
    return lambda *args, **kwargs: loka.make_plan(loka.load_policy(policy(*args, **kwargs)))


def carried(plan):
    """Each weight with what carries it, and why."""
    return {each.weight: (each.wire.value, each.reason) for each in plan.gathers}


def test_what_each_weight_is_gathered_in_and_why(planned):
    plan = planned("{weights: [{match: blocks.0.*, carry: bf16}, {match: blocks.1.up, carry: native}]}")
    assert carried(plan) == {
        "blocks.0.up.weight": ("bf16", "bf16 by sent.yaml:5"),
        "blocks.0.down.weight": ("bf16", "bf16 by sent.yaml:5"),
        "blocks.1.up.weight": ("native", "native by sent.yaml:5"),
        "blocks.1.down.weight": ("fp8", "its recipe reads one FP8 copy alone"),
        "head.weight": ("native", NATIVE),
    }
    assert [(each.nbytes, each.nbytes_bf16) for each in plan.gathers] == [
        (2 * 208 * 128, 2 * 208 * 128),
        (2 * 208 * 128, 2 * 208 * 128),
        (4 * 208 * 128, 2 * 208 * 128),  # the Parameter is float32
        (128 * (208 + 4), 2 * 208 * 128),
        (4 * 128, 2 * 128),
    ]
    assert from_json(to_json(plan)) == plan


def test_nothing_is_said_without_the_section(planned):
    plan = planned("")
    assert plan.gathers == ()
    assert plan.exchange is None
    assert list(communication_lines(plan)) == []
    assert "gathers" not in json.loads(to_json(plan))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "factory", "rules"), [each for each in models.PACKAGES if "communication" not in each[2]]
)
def test_the_plan_promises_what_generated_code_can(planned, policy, tmp_path, monkeypatch, name, factory, rules):
    sent = f"plan_sends_{name}"
    plan = planned("{weights: [{carry: fp8}]}", sent, factory, rules)
    loka.generate(policy("{weights: [{carry: fp8}]}", sent, factory, rules), tmp_path / sent)
    monkeypatch.syspath_prepend(tmp_path)
    bindings = importlib.import_module(sent).BINDINGS
    able = {
        f"{module}.{path}".lstrip(".")
        for binding in bindings
        for module in binding.modules
        for _, path, _ in binding.bound.loka_gatherable
    }
    tied = {"out.weight"} if name == "tied" else set()  # a module outside of the forward reads it too
    assert {weight for weight, (wire, _) in carried(plan).items() if wire == "fp8"} == able - tied


def test_weights_that_are_not_gathered_in_fp8_though_all_are_asked_to(planned):
    recipes = carried(planned("{weights: [{carry: fp8}]}", factory="tower_of_recipes", rules=models.RECIPES))
    assert recipes.pop("blocks.0.up.weight") == ("fp8", "fp8 by sent.yaml:5")
    assert recipes.pop("blocks.0.down.weight") == ("fp8", "fp8 by sent.yaml:5")
    assert recipes.pop("head.weight") == ("native", NATIVE)
    assert set(recipes.values()) == {("native", COPIES)}
    odd = carried(planned("{weights: [{carry: fp8}]}", factory="odd", rules=models.PADDED))
    assert odd["both"] == ("native", "its forward reads the weight in another way, too")


def test_weights_that_two_sites_read_are_gathered_in_one_way(planned):
    assert carried(planned("{weights: [{carry: fp8}]}", factory="tied")) == {
        "one.weight": ("fp8", "fp8 by sent.yaml:5"),
        "out.weight": ("native", NATIVE),  # head, which is kept, reads it
    }
    one = planned("{weights: [{match: two, carry: native}]}", factory="tied")
    assert carried(one)["one.weight"] == ("native", "native by sent.yaml:5")


@pytest.mark.parametrize(
    ("communication", "rules", "why"),
    [
        ("{weights: [{match: head, carry: fp8}]}", "", NATIVE),
        ("{weights: [{match: blocks.1.up, carry: fp8}]}", models.MIXED, COPIES),
    ],
)
def test_a_rule_for_one_site_that_cannot_comply_is_an_error(planned, communication, rules, why):
    with pytest.raises(ImpossibleRuleError) as caught:
        planned(communication, rules=rules)
    assert caught.value.code is Code.IMPOSSIBLE
    assert f"in fp8, which cannot be: {why}; write `carry: native` there" in str(caught.value)
    assert "sent.yaml:5: communication: " in str(caught.value)


def test_what_evidence_and_times_leave_open_is_no_error(planned):
    plan = planned("{weights: [{match: blocks.1.up, carry: fp8}]}", rules="  - {match: blocks.1.up, compute: auto}")
    assert carried(plan)["blocks.1.up.weight"] == ("native", NATIVE)


def test_explain_has_the_gather_of_a_site(planned):
    plan = planned("{weights: [{carry: fp8}]}")
    explained = explain(plan, "blocks.1.up")
    assert explained.gather == plan.gathers[2]
    (field,) = [each for each in explained.fields if each.path == "gather"]
    assert str(field.holds) == "communication: * (sent.yaml:5)"
    assert explain(planned(""), "blocks.1.up").gather is None


def test_diff_tells_what_is_sent_otherwise(planned):
    before = planned("{weights: [{carry: fp8}]}")
    after = planned("{weights: [{match: blocks.0.up, carry: native}], embeddings: {forward: bf16, backward: fp16}}")
    change = diff(before, after)
    assert [(each.site, each.before, each.after) for each in change.gathers] == [("blocks.0.up", "fp8", "native")]
    assert change.exchange == ("-", "forward bf16, backward fp16")
    assert not change.same
    assert diff(before, before).same


def test_exchanges_are_planned_and_told(planned):
    plan = planned("{embeddings: {forward: fp8, backward: bf16, row: 64}}")
    assert from_json(to_json(plan)) == plan
    assert plan.gathers == ()
    first, second, third = communication_lines(plan)
    assert "forward fp8, backward bf16, a scale for 64 numbers: 1.12 bytes of a number and 2 of its gradient" in first
    assert "39.1 % of float32" in first
    assert "it takes FP16 for the forward and BF16 for the backward" in second
    assert "Exchanges in fp8 were never run by us" in third
    assert not any(
        "never run" in line for line in communication_lines(planned("{embeddings: {forward: fp16, backward: bf16}}"))
    )


def test_what_loka_plan_explain_and_diff_print(policy):
    path, plain = policy("{weights: [{carry: fp8}]}"), policy("", "plain")
    table, site, change = (
        guide_pages.loka(verb)[1] for verb in (f"plan {path}", f"explain {path} blocks.1.up", f"diff {plain} {path}")
    )
    row = next(line.split() for line in table.splitlines() if line.startswith("blocks.*.up.weight"))
    assert row == ["blocks.*.up.weight", "2", "fp8", "0.0549", "0.516", "fp8", "by", "sent.yaml:5"]
    assert "All-gathers of these weights in a step: 0.11 MB for the forward and as much for the backward" in table
    assert "0.514 of bfloat16" in table
    assert "all-gather: fp8 (fp8 by sent.yaml:5), 27456 bytes for the forward and for the backward" in site
    assert "    all-gather of its weight: - -> fp8" in change
