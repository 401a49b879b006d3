"""A policy with a field under its old name: every verb takes it, and says once in a run what it is called now."""

from __future__ import annotations

import json

import pytest

OLD = "  scaling: rowwise\n  power_of_two: true\n  turned: true\nrules:\n"
NOTE = "note: policies/shop.yaml:12:3: turned is called requantize_transpose now; the old name still works\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("validate", "policies/shop.yaml", "--no-model"),
        ("validate", "policies/shop.yaml"),  # reads the policy twice
        ("plan", "policies/shop.yaml"),
        ("explain", "policies/shop.yaml", "layers.0.up"),
        ("diff", "policies/shop.yaml", "policies/shop.yaml"),
    ],
)
def test_the_note_comes_once_in_a_run(arguments, shop, loka, policy_text):
    shop.write_policy(policy_text.replace("rules:\n", OLD))
    for _ in range(2):
        ran = loka(*arguments)
        assert (ran.status, ran.err) == (0, NOTE)


def test_results_for_programs_are_those_of_the_new_name(shop, loka, policy_text):
    shop.write_policy(policy_text.replace("rules:\n", OLD))
    old = json.loads(loka("plan", shop.policy, "--json").out)
    shop.write_policy(policy_text.replace("rules:\n", OLD.replace("turned", "requantize_transpose")))
    ran = loka("plan", shop.policy, "--json")
    assert ran.err == ""
    new = json.loads(ran.out)
    assert old["plan"]["decisions"] == new["plan"]["decisions"]
    assert any(recipe.get("transposed") for each in new["plan"]["decisions"] for recipe in each["operands"] or ())


def test_both_names_are_an_error_and_no_note(shop, loka, policy_text):
    shop.write_policy(policy_text.replace("rules:\n", OLD.replace("rules", "  requantize_transpose: true\nrules")))
    ran = loka("validate", shop.policy)
    assert ran.status == 2
    assert ran.err == (
        "policies/shop.yaml:12:3: turned is the old name of requantize_transpose, which is given too; remove turned\n"
    )
