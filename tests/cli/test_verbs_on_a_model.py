"""Every verb on a small model: what it prints, its JSON, its exit status."""

from __future__ import annotations

import json
import re

import pytest

pytestmark = pytest.mark.slow


def test_validate_says_fine(shop, loka):
    ran = loka("validate", shop.policy)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == "policies/shop.yaml: fine, 6 sites\n"
    assert json.loads(loka("validate", shop.policy, "--json").out) == {"name": "shop", "rules": 2, "sites": 6}


def test_validate_without_the_model_calls_nothing(shop, loka):
    (shop.folder / "shopmodel.py").unlink()
    assert loka("validate", shop.policy, "--no-model").status == 0
    assert loka("validate", shop.policy).status == 2


def test_many_sites_are_grouped_unless_all_are_asked_for(shop, loka, policy_text):
    shop.write_policy(
        "version: 1\nname: many\nmodel: {factory: 'shopmodel:many', inputs: 'shopmodel:many_inputs', batch_size: 32}\n"
        "defaults: {compute: fp8}\n"
    )
    grouped = loka("plan", shop.policy).out
    assert "100 sites in " in grouped
    assert len(grouped.splitlines()) < 20
    assert len(loka("plan", shop.policy, "--all").out.splitlines()) > 100


def test_explain_of_an_unknown_site_suggests_one(shop, loka):
    ran = loka("explain", shop.policy, "layers.0.dwon")
    assert (ran.status, ran.out) == (2, "")
    assert "did you mean 'layers.0.down'" in ran.err


def test_diff_of_two_policies_and_of_a_policy_with_its_plan(shop, loka, policy_text):
    (shop.folder / "policies/other.yaml").write_text(
        policy_text + "  - {match: 'layers.0.up', wgrad: {compute: keep}}\n"
    )
    ran = loka("diff", shop.policy, "policies/other.yaml")
    assert ran.status == 0
    assert ran.out.startswith("1 of 6 sites to change: ")
    assert re.search(r"^change layers\.0\.up \(.* % of the FLOPs\)\n    wgrad: e4m3 rowwise -> as-is$", ran.out, re.M)
    data = json.loads(loka("diff", shop.policy, "policies/other.yaml", "--json").out)
    assert [(change["site"], change["gemm"]) for change in data["gemms"]] == [("layers.0.up", "wgrad")]

    assert loka("generate", shop.policy).status == 0
    same = loka("diff", "generated/shop/plan.json", shop.policy)
    assert same.out.startswith("Both decide the same: ")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "loka.plan", "version": 9}'])
def test_diff_with_a_file_that_is_no_plan(text, shop, loka):
    (shop.folder / "plan.json").write_text(text)
    ran = loka("diff", shop.policy, "plan.json")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("plan.json")


def test_diff_with_a_missing_plan(shop, loka):
    ran = loka("diff", shop.policy, "nowhere.json")
    assert ran.status == 2
    assert ran.err == "nowhere.json: cannot be read (No such file or directory); check the path [LK034]\n"


def test_generate_check_and_force(shop, loka):
    missing = loka("generate", shop.policy, "--check")
    assert missing.status == 1
    assert not (shop.folder / "generated").exists()
    assert loka("generate", shop.policy).status == 0
    before = shop.files()
    assert loka("generate", shop.policy, "--check").status == 0
    again = loka("generate", shop.policy)
    assert (again.status, shop.files()) == (0, before)
    assert "nothing to change" in again.out

    edited = shop.folder / "generated/shop/modules.py"
    edited.write_text(edited.read_text() + "# mine\n")
    check = loka("generate", shop.policy, "--check")
    assert check.status == 1
    assert "modules.py: edited" in check.err
    assert loka("generate", shop.policy).status == 2
    assert "# mine" in edited.read_text()
    assert loka("generate", shop.policy, "--force").status == 0
    assert shop.files() == before


def test_train_asks_for_a_generated_and_fresh_package(shop, loka, policy_text):
    ran = loka("train", shop.policy)
    assert ran.status == 1
    assert ran.err == "generated/shop is not generated yet; run: loka generate policies/shop.yaml [LK040]\n"
    assert loka("generate", shop.policy).status == 0
    shop.write_policy(policy_text.replace("max_n: 1}", "max_n: 16}"))
    stale = loka("train", shop.policy)
    assert stale.status == 1
    assert "is not what the policy says now; run: loka generate policies/shop.yaml" in stale.err


def test_train_ends_in_a_table_of_both_models(shop, loka):
    assert loka("generate", shop.policy).status == 0
    ran = loka("train", shop.policy, "--steps", "4", "--device", "cpu")
    assert ran.status == 0
    lines = {line.split()[0]: line for line in ran.out.splitlines() if line.split()}
    assert lines["NE"].rstrip().endswith("%")
    assert "AUC" in lines
    assert "cpu here, FP8 emulated, samples/s" in " ".join(ran.out.split())
    assert "every planned FP8 GEMM ran" in ran.out
    assert "in FP8: 256 of 256 samples" in ran.err

    data = json.loads(loka("train", shop.policy, "--steps", "4", "--device", "cpu", "--json").out)
    assert data["fp8"]["samples"] == data["as_is"]["samples"] == 256
    assert 0 < data["fp8"]["ne"] < 2
    assert data["fp8"]["ne"] != data["as_is"]["ne"]
    assert data["share_fp8"] > 0.9


def test_train_fails_where_a_planned_gemm_did_not_run(shop, loka, monkeypatch):
    assert loka("generate", shop.policy).status == 0
    from loka.kernels import call_counters

    monkeypatch.setattr(call_counters, "counts", lambda number: {})
    ran = loka("train", shop.policy, "--steps", "1", "--device", "cpu")
    assert ran.status == 1
    assert "planned FP8 GEMMs did not run" in ran.err
    assert "layers.0.down" in ran.err


def test_doctor_reports_versions_and_the_path(loka):
    ran = loka("doctor")
    assert ran.status == 0
    assert "FP8 path" in ran.out
    items = {item["name"]: item for item in json.loads(loka("doctor", "--json").out)["items"]}
    assert items["torch"]["status"] == "ok"
    assert items["torchao"]["note"]
    assert items["kernel as-is"]["note"] == "can run here"
    fbgemm = items["kernel fbgemm.rowwise"]
    assert (fbgemm["status"], fbgemm["found"]) == ("missing", "")
    assert fbgemm["note"] == "cannot run here: FBGEMM GenAI is not installed: pip install 'loka[fbgemm]'"
    assert "its reference runs" in items["kernel torch.scaled_mm"]["note"]
