"""What `loka plan` shows beside the sites: layers that are not replaced, and linears that are never called."""

from __future__ import annotations

import json

import pytest

from tests.support.models import product_models as models

CONV = "1 x conv1d: not replaced, and not among the sites: 8.18 % of the FLOPs of a forward"
READ = "its forward is never called: nn.MultiheadAttention 'attend.attentions.0' reads its weight itself"


@pytest.fixture
def policy(tmp_path, monkeypatch):
    """A policy of `Mixture` that keeps what has few outputs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixture.yaml").write_text(
        f'version: 1\nname: mixture\nmodel: {{factory: "{models.__name__}:Mixture", '
        f'inputs: "{models.__name__}:mixture_inputs", batch_size: 64}}\n'
        "defaults: {compute: fp8, scaling: rowwise}\nrules:\n  - {match: {max_n: 100}, compute: keep}\n"
    )
    return "mixture.yaml"


@pytest.mark.slow
def test_the_table_has_the_gemms_that_are_called_and_the_rest_is_named(policy, loka):
    shown = loka("plan", policy)
    assert shown.status == 0
    lines = shown.out.splitlines()
    table = lines[: next(place for place, line in enumerate(lines) if line.startswith("NEVER CALLED"))]
    assert not any("out_proj" in line or "unused" in line or "spare" in line for line in table)
    assert [line for line in lines if line.startswith(("NEVER", "note"))] == [
        f"NEVER CALLED attend.attentions.*.out_proj (2 linears): {READ}",
        "NEVER CALLED attend.unused: its forward is never called",
        "NEVER CALLED spare.* (2 linears): its forward is never called",
        f"note: {CONV}",
    ]
    assert ": nothing in FP8, of 6 sites" in lines[0]


@pytest.mark.slow
def test_true_reasons_come_before_rules_that_match_too(policy, loka):
    found = json.loads(loka("plan", policy, "--json").out)
    decisions = found["plan"]["decisions"]
    reasons = {row["site"]["name"]: decisions[row["gemms"][0]]["reason"] for row in found["plan"]["sites"]}
    assert reasons["attend.attentions.0"].startswith("nn.MultiheadAttention computes its projections and scores")
    assert reasons["interact.convs.1.weight"] == "keep by mixture.yaml:6"
    assert reasons["interact.out"] == "keep by mixture.yaml:6"
    assert found["sites"] == 6
    assert found["never_called"] == [
        *(f"attend.attentions.{layer}.out_proj" for layer in range(2)),
        "attend.unused",
        *(f"spare.{place}" for place in range(2)),
    ]
    assert found["notes"] == [CONV]


@pytest.mark.slow
def test_validate_counts_the_same(policy, loka):
    assert "fine, 6 sites" in loka("validate", policy).out
