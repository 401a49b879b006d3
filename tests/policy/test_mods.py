"""`mods`: what a policy may write, and how it is read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loka.errors import Code
from loka.mods.registry import MODS
from loka.policy.policy import ModRule, Policy
from loka.policy.problems import PolicyError

HEAD = 'version: 1\nname: ranker\nmodel: {factory: "pkg.models:ranker"}\n'
DEFAULTS: dict[str, tuple[tuple[str, object], ...]] = {
    "no_bias": (("final", "keep"),),
    "block_norm": (("block", 256),),
    "hard_swish": (),
    "norm_first": (),
    "merge_siblings": (),
    "batch_small": (("max_k", 256), ("max_n", 256)),
    "pad_alignment": (("to", 16),),
    "fuse_interaction": (("where", "always"),),
    "residual_high_precision": (("dtype", "float32"),),
}


def mods(*entries: str) -> str:
    return HEAD + "mods:\n" + "".join(f"  - {entry}\n" for entry in entries)


@pytest.mark.parametrize("use", MODS)
def test_a_mod_by_its_name_alone_is_for_everything(use: str, load: Callable[..., Policy]) -> None:
    (rule,) = load(mods(f"use: {use}")).mods
    assert (rule.use, rule.match, rule.except_, rule.optional, rule.note) == (use, (), (), False, None)
    assert rule.settings == DEFAULTS[use]
    assert rule.wants("layers.0.norm")
    assert not rule.names("layers.0.norm")


def test_every_parameter_can_be_written(load: Callable[..., Policy]) -> None:
    rules = load(
        mods(
            "{use: no_bias, final: drop}",
            "{use: block_norm, block: 1024}",
            "{use: batch_small, max_n: 64, max_k: 1}",
            "{use: pad_alignment, to: 8}",
            "{use: residual_high_precision, dtype: bfloat16}",
        )
    ).mods
    assert [rule.settings for rule in rules] == [
        (("final", "drop"),),
        (("block", 1024),),
        (("max_k", 1), ("max_n", 64)),
        (("to", 8),),
        (("dtype", "bfloat16"),),
    ]


def test_names_are_matched_less_what_is_excepted(load: Callable[..., Policy]) -> None:
    text = (
        "{use: no_bias, match: ['layers.*', 're:head\\.(out|gate)', over.0], except: '*.gate', optional: true, note: a}"
    )
    (rule,) = load(mods(text)).mods
    assert (rule.optional, rule.note) == (True, "a")
    wanted = {
        name: rule.wants(name) for name in ("layers.0.a", "layers.0.gate", "head.out", "head.gate", "over.0", "x")
    }
    assert [name for name, wants in wanted.items() if wants] == ["layers.0.a", "head.out", "over.0"]
    assert [name for name in wanted if rule.names(name)] == ["over.0"]
    assert [str(pattern.place) for pattern in (*rule.match, *rule.except_)] == [
        "ranker.yaml:5:28",
        "ranker.yaml:5:40",
        "ranker.yaml:5:63",
        "ranker.yaml:5:80",
    ]


def test_mods_of_a_base_come_first_and_know_their_file(load: Callable[..., Policy]) -> None:
    def shown(rule: ModRule) -> tuple[str, str]:
        return rule.source, str(rule.place)

    policy = load(
        {
            "a/ranker.yaml": "extends: ../base.yaml\nname: child\nmods: [{use: hard_swish}]\n",
            "base.yaml": mods("use: no_bias", "use: block_norm"),
        }
    )
    assert list(map(shown, policy.mods)) == [
        ("mod 1: no_bias", "base.yaml:5:5"),
        ("mod 2: block_norm", "base.yaml:6:5"),
        ("mod 3: hard_swish", "a/ranker.yaml:3:8"),
    ]
    assert policy.where("mods.2") == "a/ranker.yaml:3:8"
    assert load(HEAD).mods == ()


# an entry with § before the place, what the message says
CASES = {
    "misspelt": ("{use: §no_bais}", "did you mean no_bias? It is one of no_bias, block_norm,"),
    "unknown": ("{use: §fold}", 'text "fold" is not known; give one of no_bias'),
    "a number": ("{use: §3}", "the number 3 is not known"),
    "no name": ("§{match: a}", "use is missing; add it, as in 'use: no_bias'"),
    "nothing": ("{§use: }", "use has no value"),
    "only a name": ("§no_bias", "expected a mapping of keys to values, found text"),
    "misspelt parameter": ("{use: block_norm, §blok: 64}", "did you mean block?"),
    "another's parameter": ("{use: no_bias, §block: 64}", "one of match, except, optional, note, use, final"),
    "no power of two": ("{use: block_norm, block: §100}", "write 64 or 128"),
    "small block": ("{use: block_norm, block: §8}", "must be at least 16"),
    "large block": ("{use: block_norm, block: §2048}", "must be at most 1024"),
    "quoted block": ("{use: block_norm, block: §'64'}", "remove the quotes"),
    "a yes for a size": ("{use: pad_alignment, to: §true}", "expected a whole number"),
    "word": ("{use: no_bias, final: §kept}", "did you mean keep? It is one of keep, drop"),
    "dtype": ("{use: residual_high_precision, dtype: §fp32}", "one of float32, bfloat16"),
    "no size": ("{use: batch_small, max_k: §0}", "must be at least 1"),
    "criteria": ("{use: no_bias, match: §{kind: linear}}", 're:..." or a list of these'),
    "no pattern": ("{use: no_bias, match: §[]}", "empty; give at least one"),
    "bad regex": ("{use: no_bias, except: [a, §'re:[']}", "is no regular expression"),
    "note": ("{use: no_bias, note: §3}", "expected text"),
}

CODES = {
    **dict.fromkeys(("no name", "nothing"), Code.MISSING),
    **dict.fromkeys(("misspelt parameter", "another's parameter"), Code.UNKNOWN_KEY),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_at_its_place(case: str, load: Callable[..., Policy], refused: Callable[..., None]) -> None:
    entry, says = CASES[case]
    refused(load, mods(entry), CODES.get(case, Code.VALUE), says)


@pytest.mark.parametrize("block", [16, 64, 128, 1024])
def test_sizes_at_the_ends_load(block: int, load: Callable[..., Policy]) -> None:
    (norm, small) = load(mods(f"{{use: block_norm, block: {block}}}", "{use: batch_small, max_k: 1}")).mods
    assert (norm.settings, small.settings) == ((("block", block),), (("max_k", 1), ("max_n", 256)))


def test_mods_that_are_no_list(load: Callable[..., Policy], refused: Callable[..., None]) -> None:
    refused(load, HEAD + "mods: §no_bias\n", Code.VALUE, "begin each item with '- '")
    assert load(HEAD + "mods: []\n").mods == ()


def test_several_problems_come_together(load: Callable[..., Policy]) -> None:
    with pytest.raises(PolicyError) as caught:
        load(mods("{use: no_bais, zzz: 1}", "{use: block_norm, block: 3, zzz: 1}"))
    assert [(each.place.line, each.place.column) for each in caught.value.problems] == [(5, 11), (6, 30), (6, 33)]
