"""`loka plan` says where a target has no measurements, and `explain` which of its two errors is which."""

from __future__ import annotations

import json

import pytest

HEAD = 'version: 1\nname: shop\nmodel: {factory: "shopmodel:build", inputs: "shopmodel:inputs", batch_size: 64}\n'


@pytest.mark.slow
@pytest.mark.parametrize(("target", "noted"), [("h200", True), ("reference", False)])
def test_a_target_without_measurements_is_said(target, noted, shop, loka):
    """None ship in these tests."""
    shop.write_policy(HEAD + f"target: {target}\ndefaults: {{compute: fp8}}\n")
    note = (
        f"no measurements for {target} ship or are named, so time decided nothing; record them on that device: "
        "loka bench kernels --record FILE"
    )
    assert (f"{note}." in loka("plan", shop.policy).out.splitlines()) is noted
    assert json.loads(loka("plan", shop.policy, "--json").out)["measurements_note"] == (note if noted else "")
