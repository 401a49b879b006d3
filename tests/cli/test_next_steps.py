"""What to type next, and a profile at its default place."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from loka.probe.profile.profile_file import save
from tests.support.plan.shop_profile import profile_of

POLICY = """\
version: 1
name: shop
model: {factory: "shopmodel:build", inputs: "shopmodel:inputs", batch_size: 64}
defaults: {compute: auto}
"""
TRAIN = 'train: {batches: "shopmodel:batches", loss: "shopmodel:loss"}\n'
DEFAULT = "policies/profiles/shop.safetensors"


@pytest.mark.slow
def test_plan_names_the_one_next_step(shop, loka):
    shop.write_policy(POLICY)
    ran = loka("plan", shop.policy)
    assert (ran.status, ran.err) == (
        0,
        "next: name your batches and loss in policies/shop.yaml (train: {batches: ..., loss: ...}), then run: "
        "loka probe policies/shop.yaml; or, as weaker evidence, loka probe policies/shop.yaml --synthetic\n",
    )
    refused = loka("probe", shop.policy)
    assert refused.status == 2
    assert 'add train: {batches: "package.module:name", loss: "package.module:name"}, functions of' in refused.err
    assert (
        "or record a training loop of your own with loka.Probe (docs/probe.md), or, as weaker evidence" in refused.err
    )
    shop.write_policy(POLICY + TRAIN)
    assert loka("plan", shop.policy).err == "next: loka probe policies/shop.yaml\n"
    shop.write_policy(POLICY.replace("auto", "fp8"))
    assert loka("plan", shop.policy).err == "next: loka generate policies/shop.yaml\n"
    shop.write_policy(POLICY.replace("auto", "keep"))
    assert loka("plan", shop.policy).err == ""


@pytest.mark.slow
def test_generate_ends_with_the_lines_that_bind_the_package(shop, loka):
    shop.write_policy(POLICY.replace("auto", "fp8"))
    script = ["import sys, shopmodel", "sys.path.append('my-code')"]
    for out, lines in (
        ("generated/shop", "from generated import shop as fp8; patch = fp8.apply(model)"),
        ("fp8", "import fp8 as fp8; patch = fp8.apply(model)"),
        ("my-code/shop2", "import shop2 as fp8; patch = fp8.apply(model)  # with my-code on sys.path"),
    ):
        ran = loka("generate", shop.policy, "--out", out)
        assert (ran.status, ran.err) == (0, f"next, in your script: {lines}\n")
        script += ["model = shopmodel.build()", lines, "assert patch.sites"]
    subprocess.run([sys.executable, "-c", "\n".join(script)], check=True)
    shop.write_policy(POLICY.replace("auto", "keep"))
    ran = json.loads(loka("generate", shop.policy, "--json").out)
    assert (ran["next"], len(ran["warnings"])) == ("", 1)


@pytest.mark.slow
def test_a_profile_at_its_default_place_is_used_without_being_named(shop, loka):
    shop.write_policy(POLICY)
    save(shop.folder / DEFAULT, profile_of({}))
    data = json.loads(loka("plan", shop.policy, "--json").out)
    assert data["plan"]["profile"][0] == "profiles/shop.safetensors"
    assert (data["sites_fp8"] > 0, data["next"]) == (True, "loka generate policies/shop.yaml")
    assert loka("plan", shop.policy).err == "next: loka generate policies/shop.yaml\n"
    assert loka("explain", shop.policy, "dense").status == 0


@pytest.mark.slow
def test_without_a_training_function_a_synthetic_profile_gives_a_plan_that_says_so(shop, loka):
    shop.write_policy(POLICY)
    ran = loka("probe", shop.policy, "--synthetic", "--steps", "4", "--every", "1")
    assert ran.status == 0, ran.err
    assert "4 samples of drawn inputs and labels: weaker evidence than training in 4 steps of 64" in ran.out
    ran = loka("plan", shop.policy)
    assert "profiles/shop.safetensors is of drawn inputs and labels: weaker evidence than training." in ran.out
    assert "no evidence" not in ran.out
    assert json.loads(loka("plan", shop.policy, "--json").out)["synthetic"] is True
    merged = loka("probe", shop.policy, "--from", str(shop.folder / DEFAULT.replace("shop.", "shop.full.")))
    assert "drawn inputs and labels" in merged.out  # merging does not make it stronger


@pytest.mark.slow
def test_a_real_profile_takes_the_place_of_a_synthetic_one(shop, loka):
    shop.write_policy(POLICY + TRAIN)
    assert loka("probe", shop.policy, "--synthetic", "--steps", "2", "--every", "1").status == 0
    assert loka("probe", shop.policy, "--steps", "2", "--every", "1", "--ne-batches", "0").status == 0
    ran = loka("plan", shop.policy)
    assert (ran.status, ran.err) == (0, "next: loka generate policies/shop.yaml\n")
    assert "drawn inputs" not in ran.out
    assert "no evidence: run loka probe" not in ran.out


@pytest.mark.parametrize("other", [("--check",), ("--from", "a.safetensors"), ("--ne-batches", "2")])
def test_synthetic_training_goes_with_nothing_that_needs_a_real_one(other, shop, loka):
    shop.write_policy(POLICY)
    refused = loka("probe", shop.policy, "--synthetic", *other)
    assert refused.status == 2
    assert "--synthetic trains on drawn labels; leave out --from, --check and --ne-batches" in refused.err
