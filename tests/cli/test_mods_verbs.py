"""Verbs under a policy with mods: all are of the adapted model. What they print is in test_golden_output."""

from __future__ import annotations

import json
import sys
import warnings

import pytest
import torch

import loka as lk
from loka import dispatch
from loka.errors import InputError
from loka.probe.profile.profile_file import load_profile

pytestmark = pytest.mark.slow

MODS = """\
mods:
  - {use: no_bias, match: "layers.*", note: largest gain}
  - {use: block_norm, block: 16}
"""


@pytest.fixture
def modded(shop, loka):
    """The small model with mods in its policy."""
    path = shop.folder / shop.policy
    path.write_text(path.read_text() + MODS)
    return shop


def test_a_mistake_is_told_at_its_place(modded, loka):
    path = modded.folder / modded.policy
    path.write_text(path.read_text().replace("layers.*", "layer.*"))
    ran = loka("plan", modded.policy)
    assert ran.status == 2
    assert "shop.yaml:16:27: 'layer.*' matches no module that it could change; did you mean 'layers.*" in ran.err


ONE_DRAW = ("--steps", "3", "--seeds", "2", "--first-seed", "0", "--draws", "1")


def test_train_and_compare_set_the_adapted_model_beside_itself_in_fp8(modded, loka):
    assert loka("generate", modded.policy).status == 0
    ran = loka("train", modded.policy, "--steps", "3", "--device", "cpu")
    assert ran.status == 0
    assert "with mods   with mods, FP8   difference" in ran.out
    assert "with mods, in FP8: " in ran.err
    data = json.loads(loka("train", modded.policy, "--steps", "3", "--device", "cpu", "--json").out)
    assert data["fp8"]["ne"] != data["as_is"]["ne"]
    ran = loka("compare", modded.policy, *ONE_DRAW, "--device", "cpu", "--json")
    compared = json.loads(ran.out)
    assert compared["against"] == "with mods"
    assert compared["pairs"][0]["as_is"]["ne"] == data["as_is"]["ne"]
    assert compared["pairs"][0]["fp8"]["ne"] == data["fp8"]["ne"]


def test_compare_against_the_original_is_told_as_another_model(modded, loka):
    arguments = (modded.policy, *ONE_DRAW, "--device", "cpu")
    ran = loka("compare", *arguments, "--against", "original")
    assert ran.status == 0
    assert "NE original   NE with mods" in ran.out
    assert "NE of the model with its mods against the original, 2 seeds: " in ran.out
    assert "standard error" in ran.out
    data = json.loads(loka("compare", *arguments, "--against", "original", "--json").out)
    assert (data["against"], data["verdict"], data["budget_percent"]) == ("original", None, None)
    assert all(pair["as_is"]["ne"] != pair["with_mods"]["ne"] for pair in data["pairs"])
    assert loka("generate", modded.policy).status == 0
    other = json.loads(loka("compare", *arguments, "--json").out)
    assert other["pairs"][0]["as_is"]["ne"] == data["pairs"][0]["with_mods"]["ne"]


def test_compare_against_the_original_needs_another_model(shop, loka):
    ran = loka("compare", shop.policy, "--seeds", "2", "--against", "original")
    assert ran.status == 2
    assert "no mod of shop changes modules of the model" in ran.err
    ran = loka("compare", shop.policy, "--seeds", "2", "--against", "it")
    assert ran.status == 2
    assert "--against is 'it', but must be one of model, original" in ran.err
    ran = loka("compare", shop.policy, "--against", "original", "--budget", "0.1")
    assert ran.status == 2
    assert "--budget is what FP8 may lose" in ran.err


NAMED = "profile: profiles/shop.safetensors\n"


def test_a_profile_is_evidence_for_the_mods_that_it_was_learned_with_alone(modded, loka):
    path = modded.folder / modded.policy
    path.write_text(NAMED + path.read_text())
    assert loka("probe", modded.policy, "--steps", "4", "--draws", "2", "--ne-batches", "0").status == 0
    assert loka("probe", modded.policy, "--check").status in (0, 1)
    learned = load_profile(modded.folder / "policies/profiles/shop.safetensors")
    assert [(each.mod, each.text) for each in learned.mods] == [
        ("block_norm", "2 modules, layers.0.norm to layers.1.norm, block 16, eps 1e-05, width 32"),
        ("no_bias", "2 modules, layers.0.up to layers.1.up"),
    ]
    planned = loka("plan", modded.policy)
    assert planned.status in (0, 1), planned.err  # 1: FP8 is over the budget somewhere
    assert "MERE" in planned.out
    assert loka("validate", modded.policy).status == 0
    path.write_text(path.read_text().replace(MODS, ""))
    ran = loka("plan", modded.policy)
    assert ran.status == 2
    assert "shop.yaml:1:10: profile: profiles/shop.safetensors was learned of the model with block_norm" in ran.err
    merged = loka("probe", modded.policy, "--from", "policies/profiles/shop.full.safetensors")
    for refused in (merged, loka("probe", modded.policy, "--check")):
        assert refused.status == 2
        assert "learned of the model with block_norm (2 modules, layers.0.norm to" in refused.err


def test_a_probe_in_a_training_loop_takes_the_adapted_model(modded, loka, monkeypatch):
    assert loka("generate", modded.policy).status == 0
    monkeypatch.syspath_prepend(str(modded.folder))
    try:
        from shopmodel import build

        from generated import shop as package

        model = build()
        with pytest.raises(InputError, match=r"the policy's mods change 4 modules, 'layers.0.up' among them.*adapt"):
            lk.Probe(model, modded.policy)
        with pytest.warns(dispatch.NewModelWarning):
            package.adapt(model)
        lk.Probe(torch.compile(model), modded.policy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package.apply(model)
        lk.Probe(model, modded.policy)
        model.layers[0].norm = torch.nn.LayerNorm(32)
        with pytest.raises(InputError, match=r"probe: the policy's mods do not fit the model"):
            lk.Probe(model, modded.policy)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "generated"]:
            del sys.modules[name]
