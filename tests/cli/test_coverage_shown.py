"""Coverage in the output of `loka plan` and in reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loka.cli import output
from loka.cli.tables import plan_table
from loka.mods.policy_loader import load_policy
from loka.plan.examine import examine
from loka.plan.plan_of import plan_of
from tests.support.plan.plan_costs import SCALED_MM, Remembering

POLICY = """\
version: 1
name: shop
model: {factory: "shopmodel:build", inputs: "shopmodel:inputs", batch_size: 4096}
defaults: {compute: fp8}
"""
KEPT = "rules: [{match: head, compute: keep}]\n"


@pytest.fixture
def measured(shop) -> None:
    shop.write_policy(POLICY)
    costs = Remembering(kernels={"as-is": 1.0, SCALED_MM: 0.5})
    plan_of(examine(load_policy(shop.policy)), None, costs)
    costs.record(shop.folder / Path(shop.policy).parent / "times.jsonl")
    shop.write_policy(POLICY.replace("defaults", "measurements: times.jsonl\ndefaults") + KEPT)


@pytest.mark.slow
def test_plan_says_what_is_covered_and_what_stays_the_compilers(shop, loka, measured):
    lines = loka("plan", shop.policy).out.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("coverage"))
    names = [line.partition("  ")[0] for line in lines[start + 2 : start + 7]]
    assert names == [
        "training GEMM FLOPs in FP8",
        "inference GEMM FLOPs in FP8",
        "GPU time in LoKA's fused regions",
        "GPU time of FP8 GEMMs outside of them",
        "GPU time that stays the compiler's",
    ]
    assert lines[start + 7].startswith("GPU time: ")
    pieces = [line for line in lines if line.startswith("  head (fprop, dgrad, wgrad): ")]
    assert len(pieces) == 1
    assert pieces[0].endswith(": keep by shop.yaml:6")


@pytest.mark.slow
def test_json_and_report_have_the_same_shares(shop, loka, measured):
    found = json.loads(loka("plan", shop.policy, "--json").out)["coverage"]
    assert found["flops_training"] > 0.9
    assert sum(found["time"][part] for part in ("fused", "fp8", "compiler")) == pytest.approx(1, abs=1e-3)
    assert found["time"]["us"] == pytest.approx(sum(found["time"][f"{p}_us"] for p in ("fused", "fp8", "compiler")))
    assert 0 < len(found["largest"]) <= 3
    assert set(found["largest"][0]) == {"name", "count", "what", "us", "share", "at_least", "reason"}
    page = loka("report", shop.policy).out
    assert "\n## Coverage\n" in page
    assert f"| GPU time that stays the compiler's | {100 * found['time']['compiler']:.1f} % |" in page
    assert "- head (fprop, dgrad, wgrad): " in page


@pytest.mark.slow
def test_a_terminal_of_80_columns_breaks_no_name(shop, loka, measured, monkeypatch):
    for module in (plan_table, output):
        monkeypatch.setattr(module, "terminal_width", lambda: 80)
    lines = loka("plan", shop.policy).out.splitlines()
    assert max(map(len, lines)) <= 80
    for name in ("layers.0.down", "layers.1.up", "dense", "head"):
        assert any(line.split()[:1] == [name] for line in lines), name
    assert any(line.startswith("left out here, and shown by a wider terminal or in a file: ") for line in lines)


@pytest.mark.slow
def test_without_measurements_the_largest_go_by_flops(shop, loka, policy_text):
    shop.write_policy(policy_text + "target: reference\n")
    out = loka("plan", shop.policy).out
    assert "GPU time: not known" in out
    assert "GPU time in LoKA's" not in out
