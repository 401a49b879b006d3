"""What to type next, and a profile at its default place."""

from __future__ import annotations

import json

import pytest

from loka.mods.policy_loader import load_policy
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
def test_plan_without_evidence_names_the_one_next_step(shop, loka):
    shop.write_policy(POLICY)
    ran = loka("plan", shop.policy)
    assert (ran.status, ran.err) == (
        0,
        "next: name your batches and loss in policies/shop.yaml (train: {batches: ..., loss: ...}), then run: "
        "loka probe policies/shop.yaml\n",
    )
    refused = loka("probe", shop.policy)
    assert refused.status == 2
    assert 'add train: {batches: "package.module:name", loss: "package.module:name"}, functions of' in refused.err
    assert "or record a training loop of your own with loka.Probe (docs/probe.md)" in refused.err
    shop.write_policy(POLICY + TRAIN)
    assert loka("plan", shop.policy).err == "next: loka probe policies/shop.yaml\n"
    shop.write_policy(POLICY.replace("auto", "fp8"))
    assert loka("plan", shop.policy).err == ""


@pytest.mark.slow
def test_a_profile_at_its_default_place_is_used_without_being_named(shop, loka):
    shop.write_policy(POLICY)
    save(shop.folder / DEFAULT, profile_of({}))
    data = json.loads(loka("plan", shop.policy, "--json").out)
    assert data["plan"]["profile"][0] == "profiles/shop.safetensors"
    assert data["sites_fp8"] > 0
    assert loka("plan", shop.policy).err == ""
    assert loka("explain", shop.policy, "dense").status == 0


@pytest.mark.slow
def test_probe_then_plan_needs_no_edit(shop, loka):
    shop.write_policy(POLICY + TRAIN)
    assert loka("probe", shop.policy).status == 0
    ran = loka("plan", shop.policy)
    assert (ran.status, ran.err) == (0, "")
    assert "no evidence: run loka probe" not in ran.out


def test_where_a_profile_lies(shop):
    shop.write_policy(POLICY)
    assert load_policy(shop.policy).profile_file is None
    assert load_policy(shop.policy).default_profile == "profiles/shop.safetensors"
    (shop.folder / DEFAULT).parent.mkdir()
    (shop.folder / DEFAULT).touch()
    found = load_policy(shop.policy)
    assert (str(found.profile_file), found.profile, found.profile_name) == (DEFAULT, None, "profiles/shop.safetensors")
    shop.write_policy(POLICY + "profile: profiles/other.safetensors\n")
    named = load_policy(shop.policy)
    assert (str(named.profile_file), named.profile_name) == (
        "policies/profiles/other.safetensors",
        "profiles/other.safetensors",
    )
