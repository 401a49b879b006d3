"""Verbs with --json: one value on stdout with the keys that docs/cli.md lists."""

from __future__ import annotations

import json

import pytest

from loka.cli.main import app
from tests.support import markdown

VERBS = [command.name for command in app.registered_commands]
RUN = {
    "validate": ("policies/shop.yaml",),
    "probe": ("policies/shop.yaml", "--steps", "4", "--every", "2", "--device", "cpu"),
    "plan": ("policies/shop.yaml",),
    "explain": ("policies/shop.yaml", "layers.0.up"),
    "diff": ("policies/shop.yaml", "policies/shop.yaml"),
    "generate": ("policies/shop.yaml",),
    "train": ("policies/shop.yaml", "--steps", "2", "--device", "cpu"),
    "compare": ("policies/shop.yaml", "--steps", "2", "--device", "cpu", "--seeds", "2", "--budget", "1000"),
    "doctor": (),
}
NEVER = {
    "init": ("shopmodel:nothing",),
    "bench": ("region", "12,x"),
    "doctor": ("policies/nowhere.yaml",),
    "diff": ("policies/nowhere.yaml", "policies/shop.yaml"),
    "explain": ("policies/shop.yaml", "nowhere"),
    "schema": ("-o", "shopmodel.py"),
}  # arguments that are an error; of the other verbs, a policy that is not there


@pytest.mark.parametrize("verb", VERBS)
def test_the_page_lists_the_keys_of_every_verb(verb, loka):
    assert "--json" in loka(verb, "--help").out
    assert verb == "schema" or markdown.json_keys(verb)


@pytest.mark.slow
@pytest.mark.parametrize("verb", RUN)
def test_keys_are_those_of_the_page(verb, shop, loka):
    if verb in ("train", "compare"):
        assert loka("generate", shop.policy).status == 0
    ran = loka(verb, *RUN[verb], "--json")
    assert ran.status == 0, ran.err
    assert sorted(json.loads(ran.out)) == sorted(markdown.json_keys(verb))


@pytest.mark.parametrize("verb", VERBS)
def test_an_error_is_the_same_with_and_without(verb, shop, loka):
    arguments = NEVER.get(verb, ("policies/nowhere.yaml",))
    with_json, without = loka(verb, *arguments, "--json"), loka(verb, *arguments)
    assert (with_json.status, with_json.out) == (2, "")
    assert (without.status, without.err) == (2, with_json.err)
    assert with_json.err


@pytest.mark.slow
def test_a_report_names_the_file_it_went_to(shop, loka):
    for arguments, file in ([], "build/shop.html"), (["-o", "pages/shop.html"], "pages/shop.html"):
        ran = loka("report", shop.policy, *arguments, "--json")
        assert json.loads(ran.out) == {"name": "shop", "written": file}
        assert (shop.folder / file).read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_schema_is_itself_or_the_file_it_went_to(shop, loka):
    assert json.loads(loka("schema", "--json").out) == json.loads(loka("schema").out)
    assert json.loads(loka("schema", "-o", "schema.json", "--json").out) == {"written": "schema.json"}
    assert (shop.folder / "schema.json").read_text() == loka("schema").out


@pytest.mark.slow
def test_init_says_what_it_wrote_and_what_is_next(shop, loka):
    ran = loka("init", "shopmodel:build", "-o", "policies/first.yaml", "--batch-size", "32", "--json")
    found = json.loads(ran.out)
    assert list(found) == markdown.json_keys("init")
    assert found["written"] == ["policies/first.yaml", "policies/schema.json"]
    assert found["next"] == "loka plan policies/first.yaml"
    assert [mod["use"] for mod in found["mods"]] == ["pad_alignment", "no_bias", "block_norm"]
    assert 0.9 < found["could_fp8"] < 1


@pytest.mark.slow
def test_a_stale_package_has_its_differences(shop, loka):
    missing = loka("generate", shop.policy, "--check", "--json")
    assert missing.status == 1
    found = json.loads(missing.out)
    assert list(found) == ["fresh", "differences"]
    assert found["fresh"] is False
    assert any(line.endswith("modules.py: missing: run loka generate") for line in found["differences"])
    written = json.loads(loka("generate", shop.policy, "--json").out)
    assert "modules.py" in written["written"]
    assert json.loads(loka("generate", shop.policy, "--check", "--json").out)["written"] == []
