"""The verbs on a policy whose measurements are not there, damaged, or there."""

from __future__ import annotations

import pytest

from tests.support.plan.measured_cases import grid, passes, record

HEAD = 'version: 1\nname: shop\nmodel: {factory: "shopmodel:build", inputs: "shopmodel:inputs", batch_size: 64}\n'
VERBS = (("plan",), ("validate",), ("generate",), ("explain", "layers.0.up"))


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
@pytest.mark.parametrize(("content", "says"), [(None, "is not there; make it with"), (b"MZ" * 99, "no file of")])
def test_every_verb_that_plans_says_what_is_wrong_at_its_place(verb, content, says, shop, loka):
    shop.write_policy(HEAD + "measurements: h100.jsonl\n")
    if content is not None:
        (shop.folder / "policies/h100.jsonl").write_bytes(content)
    before = shop.files()
    ran = loka(verb[0], shop.policy, *verb[1:])
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"policies/shop.yaml:4:15: measurements: policies/h100.jsonl: {says}")
    assert shop.files() == before


def test_the_language_alone_is_checked_without_them(shop, loka):
    shop.write_policy(HEAD + "measurements: h100.jsonl\n")
    assert loka("validate", shop.policy, "--no-model").status == 0


def test_where_they_are_there_the_plan_is_made_and_nothing_is_left_beside_them(shop, loka):
    shop.write_policy(HEAD + "measurements: h100.jsonl\n")
    record(shop.folder / "policies/h100.jsonl", [*grid(), *passes()])
    before = shop.files()
    ran = loka("validate", shop.policy)
    assert (ran.status, ran.err) == (0, "")
    assert shop.files() == before


@pytest.mark.parametrize(("target", "advised"), [("h200", True), ("reference", False)])
def test_an_execution_that_nothing_can_be_priced_for_is_said(target, advised, shop, loka):
    """The reference path has no kernels to record."""
    shop.write_policy(HEAD + f"target: {target}\nexecution: {{mode: eager}}\n")
    line = loka("plan", shop.policy).out.splitlines()[-1]
    assert line.startswith(f"execution: eager: no measurements for {target} ship or are named")
    assert line.endswith("--record FILE.") is advised
