"""Well-formed YAML that is no policy: one problem each, at its place, with what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loka.errors import Code
from loka.mods.policy_loader import load_policy
from loka.policy.policy import Policy
from loka.policy.problems import PolicyError

NAME = "name: ranker\n"
MODEL = 'model: {factory: "pkg.models:ranker"}\n'
HEAD = "version: 1\n" + NAME + MODEL
TRAIN = 'train: {batches: "pkg:batches", loss: "pkg:loss", '


def in_model(text: str) -> str:
    """A policy with more in `model`."""
    return 'version: 1\nname: ranker\nmodel:\n  factory: "pkg.models:ranker"\n  ' + text + "\n"


def in_defaults(text: str) -> str:
    """A policy with defaults."""
    return HEAD + "defaults: {" + text + "}\n"


def in_rule(text: str) -> str:
    """A policy with one rule that has no match yet."""
    return HEAD + "rules:\n  - {" + text + "}\n"


# what is wrong, with § before the place; what the message says
CASES: dict[str, tuple[str, str]] = {
    # top level
    "version missing": ("§" + NAME + MODEL, "version is missing; add it: 'version: 1'"),
    "name missing": ("§version: 1\n" + MODEL, "name is missing; add it"),
    "model missing": ("§version: 1\n" + NAME, "model is missing; add it"),
    "version 2": ("version: §2\n" + NAME + MODEL, "this LoKA reads version 1; write version: 1"),
    "version true": ("version: §true\n" + NAME + MODEL, "write version: 1"),
    "version 1.0": ("version: §1.0\n" + NAME + MODEL, "write version: 1"),
    "version as text": ('version: §"1"\n' + NAME + MODEL, "write version: 1"),
    "name with a dash": ("version: 1\nname: §my-ranker\n" + MODEL, "use letters, digits and _"),
    "name that begins with a digit": ("version: 1\nname: §2ranker\n" + MODEL, "is no Python identifier"),
    "name of a parent": ("version: 1\nname: §../ranker\n" + MODEL, "is no Python identifier"),
    "name beyond ASCII": ("version: 1\nname: §modèle\n" + MODEL, "is no Python identifier"),
    "name with a line break": ('version: 1\nname: §"ranker\\n"\n' + MODEL, "is no Python identifier"),
    "empty name": ('version: 1\nname: §""\n' + MODEL, "is no Python identifier"),
    "keyword as a name": ("version: 1\nname: §class\n" + MODEL, "choose another name"),
    "dunder name": ("version: 1\nname: §__init__\n" + MODEL, "choose another name"),
    "long name": (f"version: 1\nname: §{'r' * 101}\n" + MODEL, "use at most 100"),
    "number for a name": ("version: 1\nname: §12\n" + MODEL, "expected text, found the number 12"),
    "boolean for a name": ("version: 1\nname: §true\n" + MODEL, "expected text, found true"),
    "unknown key at the top": (HEAD + "§targte: h100\n", 'unknown key "targte"; did you mean target?'),
    "unknown key like no other": (HEAD + "§zzz: 1\n", "remove it, or use one of version, name, model"),
    "setting at the top": (HEAD + "§scaling: rowwise\n", "write it under defaults or in a rule"),
    "unknown target": (HEAD + "target: §h10\n", "did you mean h100? It is one of h100, h100-pcie, h200"),
    "list for a target": (HEAD + "target: §[h100]\n", "expected text, found a list"),
    "extends a list": (HEAD + "extends: §[a.yaml]\n", "give the path of one policy"),
    # model and train
    "model as text": ("version: 1\n" + NAME + "model: §pkg:ranker\n", "expected a mapping of keys to values"),
    "factory missing": (
        "version: 1\n" + NAME + "§model: {batch_size: 8}\n",
        "factory is missing; add it, as in 'factory:",
    ),
    "unknown key in model": (in_model("§batchsize: 8"), "did you mean batch_size?"),
    "callable without a colon": (in_model("inputs: §pkg.inputs"), "perhaps pkg:inputs"),
    "callable with two colons": (in_model("inputs: §pkg:a:b"), "write package.module:name"),
    "callable that is a path": (in_model("inputs: §pkg/a.py:b"), "write package.module:name"),
    "callable with a call": (in_model("inputs: §'pkg:a()'"), "write package.module:name"),
    "callable with an empty part": (in_model("inputs: §'.pkg:a'"), "write package.module:name"),
    "callable with a keyword": (in_model("inputs: §pkg.class:a"), "write package.module:name"),
    "callable that is a list": (in_model("inputs: §[pkg, a]"), "write package.module:name"),
    "batch size 0": (in_model("batch_size: §0"), "the number 0 is out of range; it must be at least 1"),
    "batch size over 31 bits": (in_model("batch_size: §2147483648"), "it must be at most 2147483647"),
    "batch size with a fraction": (in_model("batch_size: §8.5"), "expected a whole number"),
    "batch size true": (in_model("batch_size: §true"), "expected a whole number, found true"),
    "batch size in quotes": (in_model('batch_size: §"8"'), "remove the quotes"),
    "batch size in words": (in_model("batch_size: §1k"), "write a number"),
    "loss missing": (HEAD + '§train: {batches: "a:b"}\n', "loss is missing"),
    "unknown key in train": (HEAD + TRAIN + "§lr: 0.1}\n", "remove it, or use one of batches, loss"),
    "unknown optimizer": (HEAD + TRAIN + "optimizer: §adma}\n", "did you mean adam?"),
    "learning rate 0": (HEAD + TRAIN + "learning_rate: §0}\n", "it must be greater than 0"),
    "ema of 1": (HEAD + TRAIN + "ema: §1}\n", "it must be less than 1"),
    "negative ema": (HEAD + TRAIN + "ema: §-0.1}\n", "it must be at least 0"),
    "no shared step": (HEAD + TRAIN + "shared_steps: §0}\n", "it must be at least 1"),
    "batch of training 0": (HEAD + TRAIN + "batch_size: §0}\n", "it must be at least 1"),
    "learning rate of no float32": (HEAD + TRAIN + "learning_rate: §1e31}\n", "it must be at most 1e+30"),
    "negative steps": (HEAD + TRAIN + "steps: §-1}\n", "it must be at least 1"),
    # settings, at every level
    "defaults as a list": (HEAD + "defaults: §[]\n", "expected a mapping of keys to values, found a list"),
    "unknown key in defaults": (in_defaults("§fwd: {}"), "remove it, or use one of"),
    "operand in defaults": (in_defaults("§weight: {}"), "write it under a GEMM that takes it"),
    "rule's key in defaults": (in_defaults("§match: a"), "remove it, or use one of"),
    "unknown compute": (in_defaults("compute: §FP8"), "did you mean fp8? It is one of auto, fp8, keep"),
    "unknown fuse": (in_defaults("fuse: §true"), "give one of auto, always, never"),
    "unknown format": (in_defaults("format: §e4m4"), "did you mean e4m3?"),
    "unknown scaling": (in_defaults("scaling: §row-wise"), "did you mean rowwise?"),
    "unknown range": (in_defaults("range: §7"), "the number 7 is not known; give one of dynamic, static"),
    "unknown accumulation": (in_defaults("accumulation: §slow"), "one of fast, precise"),
    "number for a boolean": (in_defaults("padding: §1"), "expected true or false, found the number 1"),
    "transposed as a word": (in_defaults("requantize_transpose: §wgrad"), "expected true or false"),
    "transposed as a number": (in_defaults("wgrad: {requantize_transpose: §1}"), "without quotes"),
    "transposed as a mapping": (
        in_defaults("dgrad: {weight: {requantize_transpose: §{from: fprop}}}"),
        "expected true or false, found a mapping",
    ),
    "transposed fprop": (
        in_defaults("fprop: {§requantize_transpose: true}"),
        "write it site-wide, or where an operand is read along its other dimension: dgrad: {weight: ...}",
    ),
    "transposed operand that is read along its rows": (
        in_defaults("dgrad: {grad_output: {§requantize_transpose: true}}"),
        'unknown key "requantize_transpose" in grad_output; write it site-wide',
    ),
    "transposed in the top level": (HEAD + "§requantize_transpose: true\n", "write it under defaults or in a rule"),
    "transposed misspelt": (in_defaults("wgrad: {§requantise_transpose: true}"), "did you mean requantize_transpose?"),
    "transposed with a scaling of its own": (
        in_defaults("wgrad: {input: §{requantize_transpose: true, scaling: rowwise, format: e4m3}}"),
        "takes the rest from the one it is made from; leave out format, scaling",
    ),
    "text for a boolean": (in_defaults('power_of_two: §"true"'), "without quotes"),
    "amax 0": (in_defaults("range: static, amax: §0"), "out of range"),
    "amax negative": (in_defaults("range: static, amax: §-1"), "out of range"),
    "amax beyond float32": (in_defaults("range: static, amax: §1e39"), "it must be at most 3.4e+38"),
    "amax as text": (in_defaults("range: static, amax: §inf"), "expected a number"),
    "negative MERE": (in_defaults("budget: {mere: §-0.1}"), "it must be at least 0"),
    "negative SQNR": (in_defaults("budget: {sqnr_db: §-3}"), "it must be at least 0"),
    "speed-up as a boolean": (in_defaults("budget: {min_speedup: §true}"), "expected a number"),
    "unknown budget": (in_defaults("budget: {§sqnr: 24}"), "did you mean sqnr_db?"),
    "budget as a number": (in_defaults("budget: §0.2"), "with keys of mere, sqnr_db"),
    "GEMM as a word": (in_defaults("fprop: §fp8"), "with keys of"),
    "wrong operand": (in_defaults("dgrad: {§input: {}}"), "a GEMM that takes it"),
    "budget in a GEMM": (in_defaults("fprop: {§budget: {}}"), 'unknown key "budget" in fprop'),
    "compute in an operand": (in_defaults("fprop: {input: {§compute: fp8}}"), "in input; remove it"),
    "unknown format in an operand": (in_defaults("wgrad: {grad_output: {format: §e5m3}}"), "did you mean e5m2?"),
    # rules and matches
    "rules as a mapping": (HEAD + "rules: §{match: a}\n", "expected a list, found a mapping; begin each item"),
    "rule as a word": (HEAD + "rules: [§a]\n", "expected a mapping of keys to values"),
    "match missing": (in_rule("compute: fp8").replace("{c", "§{c"), "match is missing; add it"),
    "unknown key in a rule": (in_rule("match: a, §optionl: true"), "did you mean optional?"),
    "note as a number": (in_rule("match: a, note: §3"), "expected text"),
    "optional as text": (in_rule("match: a, optional: §maybe"), "expected true or false"),
    "bad regex": (in_rule("match: §'re:('"), "is no regular expression (missing )"),
    "empty regex": (in_rule("match: §'re:'"), 'write "*" for every site'),
    "empty glob": (in_rule("match: §' '"), 'write "*" for every site'),
    "glob as a number": (in_rule("match: §3"), "expected a pattern, found the number 3"),
    "no patterns": (in_rule("match: §[]"), "empty; give at least one"),
    "number among patterns": (in_rule("match: [a, §3]"), "expected text, found the number 3"),
    "bad regex among patterns": (in_rule("match: [a, §'re:[']"), "is no regular expression"),
    "empty criteria": (in_rule("match: §{}"), 'write "*" for every site'),
    "unknown kind": (in_rule("match: {kind: §liner}"), "did you mean linear?"),
    "unknown criterion": (in_rule("match: {§maxn: 16}"), "did you mean max_n?"),
    "criteria that exclude each other": (in_rule("match: §{min_k: 8, max_k: 4}"), "min_k 8 is over max_k 4"),
    "share over 1": (in_rule("match: {min_share: §5}"), "it must be at most 1"),
    "size 0": (in_rule("match: {max_m: §0}"), "it must be at least 1"),
    "name that is no pattern": (in_rule("match: {name: §{a: b}}"), "expected a pattern, found a mapping"),
    "bad regex for a name": (in_rule("match: {name: [§'re:+']}"), "is no regular expression"),
    "empty profile": (HEAD + "profile: §''\n", "profile: empty"),
    "empty measurements": (HEAD + "measurements: §''\n", "measurements: empty"),
}

CODES = {
    **{case: Code.MISSING for case in CASES if case.endswith(" missing")},
    **{case: Code.UNKNOWN_KEY for case in CASES if case.startswith("unknown key")},
    **dict.fromkeys(
        (
            "setting at the top",
            "operand in defaults",
            "rule's key in defaults",
            "transposed fprop",
            "transposed in the top level",
            "wrong operand",
            "compute in an operand",
            "transposed operand that is read along its rows",
            "transposed misspelt",
            "unknown budget",
            "budget in a GEMM",
            "unknown criterion",
        ),
        Code.UNKNOWN_KEY,
    ),
    "extends a list": Code.EXTENDS,
}


@pytest.mark.parametrize("case", CASES)
def test_refused_at_its_place(case: str, load: Callable[..., Policy], refused: Callable[..., None]) -> None:
    text, says = CASES[case]
    refused(load, text, CODES.get(case, Code.VALUE), says)


NEAREST = [
    HEAD.replace("ranker", "r2", 1), HEAD.replace("ranker", "_init", 1), HEAD.replace("ranker", "r" * 100, 1),
    in_model("batch_size: 1"), in_model("batch_size: 2147483647"), in_model("inputs: pkg.klass:a"),
    *(HEAD + TRAIN + text + "}\n" for text in (
        "", "learning_rate: 1e-3", "learning_rate: 1e30", "ema: 0", "ema: 0.999", "shared_steps: 1", "batch_size: 1",
        "steps: 1",
    )),
    *map(in_defaults, (
        "range: static, amax: 1e38", "budget: {mere: 0, sqnr_db: 0}", "dgrad: {requantize_transpose: true}",
        "dgrad: {weight: {requantize_transpose: true}}", "wgrad: {grad_output: {requantize_transpose: true}}",
        "wgrad: {input: {requantize_transpose: false, scaling: rowwise, format: e4m3}}",
    )),
    *map(in_rule, (
        "match: 're:(a)'", "match: '*'", "match: '3'", "match: [a, 're:[b]']", "match: {min_k: 4, max_k: 4}",
        "match: {min_share: 1}", "match: {max_m: 1}", "match: {name: [a, b]}", "match: a, note: '3'",
    )),
]  # fmt: skip


@pytest.mark.parametrize("text", NEAREST)
def test_the_nearest_values_load(text: str, load: Callable[..., Policy]) -> None:
    assert load(text).version == 1


def test_all_problems_come_in_one_run_in_order(write: Callable[..., object]) -> None:
    path = write(
        "version: 2\nname: my-ranker\nmodel: {factory: nowhere}\ntarget: no\ndefaults:\n  compute: fp9\n"
        "  budget: {mere: -1, sqnr: 3}\nrules:\n  - match: 3\n    fprop: {format: e4m3, format: e5m2}\n"
        "mods: [{use: no_bais}]\n"
    )
    with pytest.raises(PolicyError) as caught:
        load_policy(str(path))
    found = [(each.place.line, each.place.column) for each in caught.value.problems]
    assert found == [(1, 10), (2, 7), (3, 18), (4, 9), (6, 12), (7, 18), (7, 22), (9, 12), (10, 27), (11, 14)]
    assert len(str(caught.value).splitlines()) == len(found)


def test_names_in_messages_stay_on_one_line(load: Callable[..., Policy]) -> None:
    with pytest.raises(PolicyError) as caught:
        load(HEAD + '"a\\nb\\x1b[31m": 1\n"c\\u202ed": 2\n')
    assert len(str(caught.value).splitlines()) == 2
    assert str(caught.value).replace("\n", "").isprintable()
