"""`loka probe` measures changes of NE, and plan and explain show them; a budget of the policy keeps sites."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from loka.cli import probe_run
from loka.numerics.enums import Gemm
from loka.probe.profile import profile_file

pytestmark = pytest.mark.slow

NAMED = "profile: profiles/shop.safetensors\n"
SUMMARY = "policies/profiles/shop.safetensors"


def probed(shop, loka, policy_text, *options):
    shop.write_policy(policy_text + NAMED)
    ran = loka("probe", shop.policy, "--draws", "2", *options)
    assert ran.status == 0, ran.err
    return ran, profile_file.load_profile(shop.folder / SUMMARY)


def test_a_probe_measures_what_it_estimates_and_plans_show_it(shop, loka, policy_text):
    ran, profile = probed(shop, loka, policy_text)
    site = profile.site("layers.0.up")
    forward = [each.operands for each in site.estimates if each.gemm is Gemm.FPROP]
    assert [each.operands for each in site.ne if each.gemm is Gemm.FPROP] == forward
    backward = [(each.gemm, each.operands) for each in site.ne if each.gemm is not Gemm.FPROP]
    own = {each.gemm: each.operands for each in reversed(site.estimates) if each.gemm is not Gemm.FPROP}
    assert dict(backward) == own  # the policy's own recipe comes first
    assert len(backward) == 2
    assert profile.site("head").ne == ()  # kept
    assert " NE " in ran.out.splitlines()[0]
    planned = loka("plan", shop.policy)
    assert "predicted change of NE: +" in planned.out
    assert "change of NE" in loka("explain", shop.policy, "layers.0.up").out
    summary = json.loads(loka("plan", shop.policy, "--json").out)
    assert summary["ne"]["ne_percent"]["mean"] > 0
    assert summary["ne"]["unknown"] == []


def test_no_batches_no_changes_of_ne(shop, loka, policy_text):
    ran, profile = probed(shop, loka, policy_text, "--ne-batches", "0")
    assert all(site.ne == () for site in profile.sites)
    assert " NE " not in ran.out
    assert "change of NE" not in loka("plan", shop.policy).out


def test_a_plan_says_what_its_change_of_ne_leaves_out_and_what_to_run(shop, loka, policy_text):
    _, profile = probed(shop, loka, policy_text)
    fewer = [replace(site, ne=()) if site.name == "layers.0.up" else site for site in profile.sites]
    profile_file.save(shop.folder / SUMMARY, replace(profile, sites=tuple(fewer)))
    planned = loka("plan", shop.policy)
    assert (
        "; not measured, and left out, at 1 more in FP8: loka probe measures more with fewer --ne-batches, and loka "
        "compare judges the whole model.\n"
    ) in planned.out


def break_evaluation(shop, statement):
    """The loss does this where no gradients are needed, as a Probe measures changes of NE."""
    path, head = shop.folder / "shopmodel.py", "def loss(output, target):\n"
    broken = f"{head}    if not torch.is_grad_enabled():\n        {statement}\n"
    path.write_text(path.read_text(encoding="utf-8").replace(head, broken), encoding="utf-8")


def test_a_model_that_cannot_be_evaluated_is_probed_with_a_note(shop, loka, policy_text):
    break_evaluation(shop, "raise ValueError('broken')")
    ran, profile = probed(shop, loka, policy_text)
    assert "the profile has no changes of NE: " in ran.err
    assert "broken" in ran.err
    assert all(site.ne == () and site.operands for site in profile.sites)


def test_a_loss_without_one_number_has_no_place_in_loka(shop, loka, policy_text):
    break_evaluation(shop, "return output")
    ran, _ = probed(shop, loka, policy_text)
    assert "note: the profile has no changes of NE: train.loss: it returned no Tensor of one number\n" in ran.err


def test_a_budget_that_is_too_small_for_forced_sites_fails_the_plan(shop, loka, policy_text):
    probed(shop, loka, policy_text)
    shop.write_policy(policy_text + NAMED + "budget: {ne_percent: 0}\n")
    planned = loka("plan", shop.policy)
    assert planned.status == 1
    assert "the plan is over budget by profiles/shop.safetensors: a change of NE of +" in planned.err
    assert "budget 0 %" in planned.out


def test_what_is_merged_has_no_changes_of_ne_and_a_single_profile_keeps_them(shop, loka, policy_text):
    _, profile = probed(shop, loka, policy_text, "--steps", "4")
    full = SUMMARY.replace(".safetensors", ".full.safetensors")
    assert loka("probe", shop.policy, "--from", full, "--draws", "2").status == 0
    assert profile_file.load_profile(shop.folder / SUMMARY).sites[0].ne == profile.sites[0].ne
    assert (
        loka("probe", shop.policy, "--steps", "4", "--seed", "1", "-o", "other.safetensors", "--draws", "2").status == 0
    )
    assert loka("probe", shop.policy, "--from", full, "other.full.safetensors", "--draws", "2").status == 0
    assert all(site.ne == () for site in profile_file.load_profile(shop.folder / SUMMARY).sites)


def test_when_time_is_up_the_largest_sites_have_been_measured(shop, loka, policy_text, monkeypatch):
    monkeypatch.setattr(probe_run, "NE_SECONDS", 0.0)
    ran, profile = probed(shop, loka, policy_text)
    largest = max((site for site in profile.sites if site.operands and site.name != "head"), key=lambda s: s.k * s.n)
    assert [site.name for site in profile.sites if site.ne] == [largest.name]
    assert "was measured at the 1 of 5 sites with the most FLOPs" in ran.err
    summary = json.loads(loka("plan", shop.policy, "--json").out)
    assert len(summary["ne"]["unknown"]) == 4
