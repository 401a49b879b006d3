"""The verbs on a policy whose measurements are not there, damaged, or there (see test_golden_output too)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loka.mods.policy_loader import load_policy
from loka.plan.examine import examine
from loka.plan.plan_of import plan_of
from tests.support.plan.measured_cases import grid, passes, record
from tests.support.plan.plan_costs import SCALED_MM, Remembering

pytestmark = pytest.mark.slow

HEAD = 'version: 1\nname: shop\nmodel: {factory: "shopmodel:build", inputs: "shopmodel:inputs", batch_size: 64}\n'
FP8 = HEAD.replace("64", "4096") + "defaults: {compute: fp8}\n"
NAMED = FP8.replace("defaults", "measurements: times.jsonl\ndefaults")
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
    line = loka("plan", shop.policy).out.splitlines()[0]
    assert f"; execution: eager: no measurements for {target} ship or are named" in line
    assert line.endswith("--record FILE.") is advised


@pytest.mark.parametrize(("target", "noted"), [("h200", True), ("reference", False)])
def test_a_target_without_measurements_is_said(target, noted, shop, loka):
    """None ship in these tests."""
    shop.write_policy(HEAD + f"target: {target}\ndefaults: {{compute: fp8}}\n")
    note = (
        f"no measurements for {target} ship or are named, so time decided nothing; record them on that device: "
        "loka bench kernels --record FILE"
    )
    lines = loka("plan", shop.policy).out.splitlines()
    assert lines[0].endswith(f"; {note}.") is noted
    assert any(line.startswith("GPU time: not known") for line in lines)
    assert json.loads(loka("plan", shop.policy, "--json").out)["measurements_note"] == (note if noted else "")


@pytest.fixture
def measured(shop) -> None:
    """Every part that the policy's sites can be made of, in a file that the policy names."""
    shop.write_policy(FP8)
    costs = Remembering(kernels={"as-is": 1.0, SCALED_MM: 1.0, "fbgemm.rowwise": 0.9})
    plan_of(examine(load_policy(shop.policy)), None, costs)
    costs.record(shop.folder / Path(shop.policy).parent / "times.jsonl")
    shop.write_policy(NAMED)


def test_explain_says_why_a_site_has_no_times(shop, loka, measured):
    folder = shop.folder / Path(shop.policy).parent
    text = NAMED.replace("compute: fp8", "compute: fp8, scaling: tensorwise")
    (folder / "other.yaml").write_text(text)
    out = loka("explain", str(folder / "other.yaml"), "layers.1.up").out
    assert "not timed: times.jsonl lacks its own GEMMs, or the recipe that it may run in" in out
    assert "time of one call" not in out


def test_a_package_is_stale_once_its_measurements_changed(shop, loka, measured):
    assert loka("generate", shop.policy).status == 0
    assert loka("generate", "--check", shop.policy).status == 0
    path = shop.folder / Path(shop.policy).parent / "times.jsonl"
    path.unlink()
    costs = Remembering(kernels={"as-is": 1.0, SCALED_MM: 1.0})
    plan_of(examine(load_policy(str(shop.folder / shop.policy))), None, costs)
    costs.record(path)
    stale = loka("generate", "--check", shop.policy)
    assert stale.status == 1
    assert "stale" in stale.err
