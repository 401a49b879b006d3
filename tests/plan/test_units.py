"""`units:` of a policy: modules that FSDP shards one by one, beyond which no forward is rewritten."""

from __future__ import annotations

import pytest

import loka
from loka.plan.units import check_units, within_units
from loka.policy.problems import PolicyError
from tests.support.models import sharded_models as models

BLOCK = {"norm", "up", "act", "down"}


def planned(tmp_path, units, factory="tower"):
    """The plan of a model with these units, and its policy."""
    path = tmp_path / "policy.yaml"
    path.write_text(models.POLICY.format(name="units", factory=factory, rules=f"units: {units}" if units else ""))
    policy = loka.load_policy(path)
    return loka.make_plan(policy), policy


def inlined(plan):
    """By module that is bound, what its forward includes."""
    return {
        module: set(binding.forward.inlined) if binding.forward else set()
        for binding in plan.bindings
        for module in binding.modules
    }


@pytest.mark.parametrize(
    ("units", "found"),
    [
        ("", {"blocks.0": BLOCK, "blocks.1": BLOCK}),
        ("['blocks.*']", {"blocks.0": BLOCK, "blocks.1": BLOCK}),
        ("['blocks.*', 'blocks.0.norm']", {"blocks.0": BLOCK - {"norm"}, "blocks.1": BLOCK}),
        ("['*.up', '*.down']", {f"blocks.{place}.{name}": set() for place in (0, 1) for name in ("up", "down")}),
    ],
)
def test_no_forward_includes_a_unit(tmp_path, units, found):
    assert inlined(planned(tmp_path, units)[0]) == found


def test_a_chain_ends_at_a_unit(tmp_path):
    assert inlined(planned(tmp_path, "[one]", "tied")[0]) == {"": {"two", "out"}, "one": set()}


def test_a_pattern_without_a_module(tmp_path):
    with pytest.raises(PolicyError, match=r"policy.yaml:11:9: 'block\.\*' matches no module; did you"):
        planned(tmp_path, "['block.*']")


def test_an_empty_list(tmp_path):
    with pytest.raises(PolicyError, match="units"):
        planned(tmp_path, "[]")


def test_siblings_are_those_of_one_unit():
    groups = (("a.0.x", "a.0.y", "a.1.x", "b"), ("c", "d"))
    assert within_units(groups, {"a.0", "a.1"}) == (("a.0.x", "a.0.y"), ("c", "d"))
    assert within_units(groups, ()) == groups


def test_a_unit_that_mods_take_in_is_an_error(tmp_path):
    plan, policy = planned(tmp_path, "['blocks.0.norm']")
    check_units(policy, plan.bindings, {"blocks.0.norm"})
    whole = planned(tmp_path, "")[0].bindings
    with pytest.raises(PolicyError, match=r"policy.yaml:11:9: 'blocks.0.norm' is a unit, and mods make its forward"):
        check_units(policy, whole, {"blocks.0.norm"})
