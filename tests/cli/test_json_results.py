"""Verbs with --json: one value on stdout with the keys that docs/cli.md lists."""

from __future__ import annotations

import json

import pytest

from loka.cli.main import app
from tests.support import markdown

PAGE = markdown.read(markdown.REPOSITORY / "docs" / "cli.md")


def listed(verb: str) -> list[str]:
    """The keys in the page's table."""
    (row,) = re.findall(rf"^\| `{verb}` \| (.*) \|$", PAGE, re.MULTILINE)
    return re.findall(r"`(\w+)`", row.partition(";")[0])


@pytest.mark.parametrize(
    "verb", [command.callback.__module__.rpartition(".")[2] for command in app.registered_commands]
)
def test_every_verb_takes_json_but_those_that_the_page_names(verb, loka):
    assert ("--json" in loka(verb, "--help").out) is (verb not in ("schema", "report"))


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["validate", "plan", "generate"])
def test_keys_are_those_of_the_page(verb, shop, loka):
    ran = loka(verb, shop.policy, "--json")
    assert (ran.status, ran.err) == (0, "")
    assert sorted(json.loads(ran.out)) == sorted(listed(verb))


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
