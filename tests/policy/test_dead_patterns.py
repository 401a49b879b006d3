"""Patterns that match nothing: an error with the nearest names, unless the rule is optional."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from loka.errors import Code
from loka.policy.settings import SiteFacts, SiteSettings

HEAD = 'version: 1\nname: ranker\nmodel: {factory: "pkg.models:ranker"}\n'
SITES = [
    *(SiteFacts(f"layers.{i}.mlp.{j}", "linear", 64, 32, 48, 0.1) for i in range(3) for j in range(2)),
    SiteFacts("cross.weights.0", "functional_linear", 64, 480, 480, 0.39),
    SiteFacts("head.out", "linear", 64, 32, 1, 0.01),
]
Resolve = Callable[..., tuple[SiteSettings, ...]]

# a rule with § before the place of its dead pattern, and what the message says
CASES = {
    "misspelt glob": ("{match: §'layer.*.mlp.*'}", "did you mean 'layers.*.mlp.*'"),
    "misspelt name": ("{match: §head.aut}", "'head.out'"),
    "misspelt beginning": ("{match: §'layres.*'}", "'layers.*'"),
    "case": ("{match: §HEAD.out}", "the model has, for example, 'layers.*.mlp.*'"),
    "like nothing": ("{match: §'zzzzzz'}", "the model has, for example, 'layers.*.mlp.*'"),
    "regex": ("{match: §'re:layer\\.\\d+\\.mlp\\.\\d+'}", "did you mean 'layers.*.mlp.*'"),
    "regex for a part": ("{match: §'re:layers'}", "matches no site"),
    "one of a list": ("{match: ['head.*', §'haed.*']}", "did you mean 'head.*'"),
    "kind": (
        "§{match: {kind: bmm}}",
        "no site is kind: bmm; of the model, its kinds are functional_linear (1), linear (7)",
    ),
    "size": ("§{match: {min_n: 1000}}", "no site is min_n: 1000; of the model, its n goes from 1 to 480"),
    "name within a mapping": ("{match: {kind: linear, name: §'haed.*'}}", "did you mean 'head.*'"),
    "nothing has all of it": ("§{match: {kind: linear, name: 'cross.*'}}", "no site is kind: linear, name: cross.*"),
}


@pytest.mark.parametrize("case", CASES)
def test_dead_pattern_is_refused_with_a_hint(case: str, resolve: Resolve, refused: Callable[..., None]) -> None:
    rule, says = CASES[case]
    refused(resolve, HEAD + f"rules:\n  - {rule}\n", Code.NO_MATCH, says, SITES)


@pytest.mark.parametrize("case", CASES)
def test_optional_excuses_it(case: str, resolve: Resolve) -> None:
    rule = CASES[case][0].replace("{match", "{optional: true, match", 1)
    assert len(resolve(HEAD + f"rules:\n  - {rule}\n", SITES)) == len(SITES)


def test_every_hint_says_how_to_excuse_it(resolve: Resolve, refused: Callable[..., None]) -> None:
    refused(resolve, HEAD + "rules: [{match: §nothing}]\n", Code.NO_MATCH, "or set optional: true", SITES)


def test_a_model_without_a_gemm(resolve: Resolve, refused: Callable[..., None]) -> None:
    assert resolve(HEAD, []) == ()
    refused(resolve, HEAD + "rules: [{match: §'*'}]\n", Code.NO_MATCH, "the model has no GEMM: correct the factory", [])
    refused(resolve, HEAD + "rules: [§{match: {max_k: 8}}]\n", Code.NO_MATCH, "the model has no GEMM", [])


def test_dead_patterns_of_a_large_model_are_found_in_a_moment(resolve: Resolve, refused: Callable[..., None]) -> None:
    sites = [SiteFacts(f"layers.{i}.mlp.fc{i}", "linear", 64, 32, 32, 1e-4) for i in range(10_000)]
    start = time.process_time()
    refused(resolve, HEAD + "rules: [{match: §'layer.17.mlp.fc17'}]\n", Code.NO_MATCH, "'layers.*.mlp.fc17'", sites)
    assert time.process_time() - start < 3.0
