"""`communication:` of a policy: what it takes, and where what is wrong is found."""

from __future__ import annotations

import pytest

from loka.errors import Code
from loka.policy.communication import ExchangeSetting, Wire
from loka.policy.settings import SiteFacts

HEAD = 'version: 1\nname: ranker\nmodel: {factory: "pkg.models:ranker"}\n'
SITES = [SiteFacts(name, "linear", 16, 128, n, 0.5) for name, n in (("blocks.0.up", 64), ("head", 1))]


@pytest.mark.parametrize(
    ("text", "code", "problem"),
    [
        ("weights: [{carry: §fp9}]", Code.VALUE, "did you mean fp8? It is one of fp8, fp16, bf16, native"),
        ("weights: §fp8", Code.VALUE, 'expected a list, found text "fp8"'),
        ("weights: §3", Code.VALUE, "expected a list, found the number 3"),
        ("weights: §[]", Code.VALUE, "empty; give at least one"),
        ("weights: [§{match: head}]", Code.MISSING, "carry is missing"),
        ("weights: [{§carri: fp8, carry: fp8}]", Code.UNKNOWN_KEY, 'unknown key "carri" in a rule; did you mean'),
        ("weights: [{match: §7, carry: fp8}]", Code.VALUE, "expected a pattern, found the number 7"),
        ("embeddings: §fp8", Code.VALUE, "expected a mapping of keys to values"),
        ("embeddings: §[{match: table_1, forward: fp8}]", Code.VALUE, "one format for all tables of a sharder"),
        ("embeddings: §{match: table_1, forward: fp8}", Code.VALUE, "one format for all tables of a sharder"),
        ("embeddings: §{forward: fp8, backward: native}", Code.VALUE, "fp8 needs row, and nothing else has one"),
        ("embeddings: §{forward: bf16, backward: fp16, row: 8}", Code.VALUE, "fp8 needs row, and nothing else has one"),
        ("embeddings: {forward: §int8, backward: native}", Code.VALUE, "give one of fp8, fp16, bf16, native"),
        ("embeddings: {forward: fp8, backward: native, row: §0}", Code.VALUE, "it must be at least 1"),
    ],
)
def test_what_is_wrong_is_told_at_its_place(load, refused, text, code, problem):
    refused(load, f"{HEAD}communication:\n  {text}\n", code, problem)


def test_a_pattern_without_a_site(resolve, refused):
    text = f'{HEAD}communication:\n  weights: [{{match: §"block.*", carry: fp8}}]\n'
    refused(resolve, text, Code.NO_MATCH, "'block.*' matches no site; did you mean", SITES)
    assert resolve(text.replace("carry", "optional: true, carry"), SITES)[0].history.get("gather") is None


def test_later_rules_win(resolve):
    rules = "[{carry: fp8}, {match: {max_n: 16}, carry: native}, {match: blocks.*, carry: bf16}]"
    by_site = resolve(f"{HEAD}communication:\n  weights: {rules}\n", SITES)
    found = [[(each.value, each.source) for each in settings.history["gather"]] for settings in by_site]
    assert found == [
        [("fp8", "communication: *"), ("bf16", "communication: blocks.*")],
        [("fp8", "communication: *"), ("native", "communication: max_n: 16")],
    ]


def test_a_rule_without_a_match_is_for_every_site(resolve):
    text = f"{HEAD}communication:\n  weights: [{{carry: native}}]\n"
    (given,) = {settings.history["gather"] for settings in resolve(text, SITES)}
    assert [(each.value, each.line, each.names_one_site) for each in given] == [("native", 5, False)]


def test_the_section_merges_with_that_of_a_base(load):
    files = {
        "ranker.yaml": "extends: base.yaml\ncommunication: {weights: [{carry: bf16}]}\n",
        "base.yaml": f"{HEAD}communication:\n  weights: [{{carry: fp8}}]\n"
        "  embeddings: {forward: fp16, backward: native}\n",
    }
    policy = load(files)
    assert [leaf.value for rule in policy.gathers for leaf in rule.leaves] == ["bf16"]
    assert policy.exchange == ExchangeSetting(forward=Wire.FP16, backward=Wire.NATIVE)


def test_bytes_of_a_number_count_its_part_of_a_scale():
    exchange = ExchangeSetting(forward=Wire.FP8, backward=Wire.BF16, row=50)
    assert exchange.bytes_each(Wire.FP8) == (52 + 8) / 50
    assert exchange.bytes_each(Wire.BF16) == exchange.bytes_each(Wire.FP16) == 2
    assert exchange.bytes_each(Wire.NATIVE) == 4
