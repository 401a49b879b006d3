"""The verbs on a policy that names measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loka.cli.tables import plan_table
from loka.mods.policy_loader import load_policy
from loka.plan.examine import examine
from loka.plan.plan_of import plan_of
from loka.plan.serialize import from_json
from tests.support.plan.plan_costs import SCALED_MM, Remembering

pytestmark = pytest.mark.slow

POLICY = """\
version: 1
name: shop
model: {factory: "shopmodel:build", inputs: "shopmodel:inputs", batch_size: 4096}
defaults: {compute: fp8}
"""
NAMED = POLICY.replace("defaults", "measurements: times.jsonl\ndefaults")


@pytest.fixture
def measured(shop) -> None:
    """Every part that the policy's sites can be made of, in a file that the policy names."""
    shop.write_policy(POLICY)
    costs = Remembering(kernels={"as-is": 1.0, SCALED_MM: 1.0, "fbgemm.rowwise": 0.9})
    plan_of(examine(load_policy(shop.policy)), None, costs)
    costs.record(shop.folder / Path(shop.policy).parent / "times.jsonl")
    shop.write_policy(NAMED)


def test_plan_shows_the_times_beside_bf16(shop, loka, measured):
    ran = loka("plan", shop.policy)
    assert (ran.status, ran.err) == (0, "")
    head, *lines = ran.out.splitlines()
    assert head.split()[-5:] == ["us", "BF16", "us", "gain", "reason"]
    up = next(line for line in lines if line.startswith("layers.0.up "))
    assert "slower than BF16 here" in up
    assert "0." in up.split("x   fp8")[0][-4:]
    assert "budget of MERE 0.2, SQNR 24 dB, min_speedup 1.05: 6 sites" in lines
    assert lines[-1].startswith("GEMMs with their norms: ")
    assert lines[-1].endswith("by times.jsonl (sites: 6 measured).")


def test_what_the_step_waits_for_stands_after_the_times(shop, loka, measured):
    shop.write_policy(NAMED.replace("defaults", "execution: {mode: compiled, host_ms: 2}\ndefaults"))
    *_, times, host = loka("plan", shop.policy).out.splitlines()
    assert times.startswith("GEMMs with their norms: ")
    assert host.startswith("the host, compiled: ")
    assert "the step waits for the host" in host
    assert "host us" in loka("explain", shop.policy, "layers.0.up").out


def test_a_narrow_terminal_gets_a_legend(shop, loka, measured, monkeypatch):
    monkeypatch.setattr(plan_table, "terminal_width", lambda: 100)
    ran = loka("plan", shop.policy)
    table, _, rest = ran.out.partition("\na: ")
    assert max(map(len, table.splitlines())) <= 100
    assert rest.startswith("e4m3 rowwise by fbgemm.rowwise\n")
    assert "\n1: fp8 by shop.yaml:5, slower than BF16 here\n" in rest


def test_plan_as_json_has_every_time(shop, loka, measured):
    data = json.loads(loka("plan", shop.policy, "--json").out)
    assert data["measurements"][0] == "times.jsonl"
    assert data["time"]["us"] > data["time"]["as_is_us"] > 0
    plan = from_json(json.dumps(data["plan"]))
    assert plan.sites[0].timing.chosen.us > 0
    assert data["plan"]["measurements"]


def test_explain_lists_every_way_and_every_kernel(shop, loka, measured):
    out = loka("explain", shop.policy, "layers.1.up").out
    assert "time of one call by times.jsonl: " in out
    ways = [line for line in out.splitlines() if line.split()[:3] == ["fbgemm.rowwise", "as-is", "as-is"]]
    assert len(ways) == 1
    assert ways[0].endswith("forced into FP8: dgrad, wgrad")
    assert ways[0].split()[6:8] == ["0.12", "31.5"]
    assert "slower than fbgemm.rowwise: " in out
    (chosen,) = [line for line in out.splitlines() if line.split()[:2] == ["fprop", "fbgemm.rowwise"]]
    assert chosen.split()[3:] == ["1.1", "0.12", "31.5", "measured", "chosen"]
    assert "fprop, dgrad, wgrad  mslk.rowwise" in out
    assert out.count("kernel's MERE  kernel's SQNR dB") == 2  # not the MERE that a profile predicts
    data = json.loads(loka("explain", shop.policy, "layers.1.up", "--json").out)
    assert len(data["timing"]["candidates"]) == 8
    assert {each["kernel"] for each in data["gemms"][0]["times"]} == {SCALED_MM, "fbgemm.rowwise", "as-is"}


def test_explain_says_why_a_site_has_no_times(shop, loka, measured):
    folder = shop.folder / Path(shop.policy).parent
    text = NAMED.replace("compute: fp8", "compute: fp8, scaling: tensorwise")
    (folder / "other.yaml").write_text(text)
    out = loka("explain", str(folder / "other.yaml"), "layers.1.up").out
    assert "not timed: times.jsonl lacks its own GEMMs, or the recipe that it may run in" in out
    assert "time of one call" not in out


def test_diff_shows_changed_kernels_and_times(shop, loka, measured):
    folder = shop.folder / Path(shop.policy).parent
    (folder / "before.yaml").write_text(POLICY)
    out = loka("diff", str(folder / "before.yaml"), shop.policy).out
    assert "e4m3 rowwise by fbgemm.rowwise" in out
    assert "measurements: none -> times.jsonl (" in out
    assert "GEMMs with their norms, a training step: - -> " in out
    data = json.loads(loka("diff", str(folder / "before.yaml"), shop.policy, "--json").out)
    assert {each["before"] for each in data["times"]} == {None}
    assert loka("diff", shop.policy, shop.policy).out.startswith("Both decide the same: ")


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
