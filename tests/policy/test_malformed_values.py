"""Well-formed YAML that is no policy: one problem each, at its place, with what to do, and a control that loads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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


# what is wrong, with § before the place; what the message says; the nearest text that loads
CASES: dict[str, tuple[str, str, str]] = {
    # top level
    "version missing": ("§" + NAME + MODEL, "version is missing; add it: 'version: 1'", HEAD),
    "name missing": ("§version: 1\n" + MODEL, "name is missing; add it", HEAD),
    "model missing": ("§version: 1\n" + NAME, "model is missing; add it", HEAD),
    "version 2": ("version: §2\n" + NAME + MODEL, "this LoKA reads version 1; write version: 1", HEAD),
    "version true": ("version: §true\n" + NAME + MODEL, "write version: 1", HEAD),
    "version 1.0": ("version: §1.0\n" + NAME + MODEL, "write version: 1", HEAD),
    "version as text": ('version: §"1"\n' + NAME + MODEL, "write version: 1", HEAD),
    "name with a dash": ("version: 1\nname: §my-ranker\n" + MODEL, "use letters, digits and _", HEAD),
    "name that begins with a digit": (
        "version: 1\nname: §2ranker\n" + MODEL,
        "is no Python identifier",
        HEAD.replace("ranker", "r2", 1),
    ),
    "name of a parent": ("version: 1\nname: §../ranker\n" + MODEL, "is no Python identifier", HEAD),
    "name beyond ASCII": ("version: 1\nname: §modèle\n" + MODEL, "is no Python identifier", HEAD),
    "name with a line break": ('version: 1\nname: §"ranker\\n"\n' + MODEL, "is no Python identifier", HEAD),
    "empty name": ('version: 1\nname: §""\n' + MODEL, "is no Python identifier", HEAD),
    "keyword as a name": (
        "version: 1\nname: §class\n" + MODEL,
        "choose another name",
        HEAD.replace("ranker", "klass", 1),
    ),
    "dunder name": ("version: 1\nname: §__init__\n" + MODEL, "choose another name", HEAD.replace("ranker", "_init", 1)),
    "long name": (f"version: 1\nname: §{'r' * 101}\n" + MODEL, "use at most 100", HEAD.replace("ranker", "r" * 100, 1)),
    "number for a name": ("version: 1\nname: §12\n" + MODEL, "expected text, found the number 12", HEAD),
    "boolean for a name": (
        "version: 1\nname: §true\n" + MODEL,
        "expected text, found true",
        HEAD.replace("ranker", '"true_"', 1),
    ),
    "unknown key at the top": (
        HEAD + "§targte: h100\n",
        'unknown key "targte"; did you mean target?',
        HEAD + "target: h100\n",
    ),
    "unknown key like no other": (HEAD + "§zzz: 1\n", "remove it, or use one of version, name, model", HEAD),
    "setting at the top": (
        HEAD + "§scaling: rowwise\n",
        "write it under defaults or in a rule",
        in_defaults("scaling: rowwise"),
    ),
    "unknown target": (
        HEAD + "target: §h10\n",
        "did you mean h100? It is one of h100, h200, reference",
        HEAD + "target: h200\n",
    ),
    "list for a target": (HEAD + "target: §[h100]\n", "a list is not known; give one of", HEAD + "target: reference\n"),
    "extends a list": (HEAD + "extends: §[a.yaml]\n", "give the path of one policy", HEAD),
    # model and train
    "model as text": ("version: 1\n" + NAME + "model: §pkg:ranker\n", "expected a mapping of keys to values", HEAD),
    "factory missing": (
        "version: 1\n" + NAME + "§model: {batch_size: 8}\n",
        "factory is missing; add it, as in 'factory:",
        HEAD,
    ),
    "unknown key in model": (in_model("§batchsize: 8"), "did you mean batch_size?", in_model("batch_size: 8")),
    "callable without a colon": (in_model("inputs: §pkg.inputs"), "perhaps pkg:inputs", in_model("inputs: pkg:inputs")),
    "callable with two colons": (
        in_model("inputs: §pkg:a:b"),
        "write package.module:name",
        in_model("inputs: pkg.a:b"),
    ),
    "callable that is a path": (
        in_model("inputs: §pkg/a.py:b"),
        "write package.module:name",
        in_model("inputs: pkg.a:b"),
    ),
    "callable with a call": (in_model("inputs: §'pkg:a()'"), "write package.module:name", in_model("inputs: 'pkg:a'")),
    "callable with an empty part": (
        in_model("inputs: §'.pkg:a'"),
        "write package.module:name",
        in_model("inputs: 'pkg:a'"),
    ),
    "callable with a keyword": (
        in_model("inputs: §pkg.class:a"),
        "write package.module:name",
        in_model("inputs: pkg.klass:a"),
    ),
    "callable that is a list": (in_model("inputs: §[pkg, a]"), "write package.module:name", in_model("inputs: pkg:a")),
    "batch size 0": (
        in_model("batch_size: §0"),
        "the number 0 is out of range; it must be at least 1",
        in_model("batch_size: 1"),
    ),
    "batch size over 31 bits": (
        in_model("batch_size: §2147483648"),
        "it must be at most 2147483647",
        in_model("batch_size: 2147483647"),
    ),
    "batch size with a fraction": (in_model("batch_size: §8.5"), "expected a whole number", in_model("batch_size: 8")),
    "batch size true": (
        in_model("batch_size: §true"),
        "expected a whole number, found true",
        in_model("batch_size: 1"),
    ),
    "batch size in quotes": (in_model('batch_size: §"8"'), "remove the quotes", in_model("batch_size: 8")),
    "batch size in words": (in_model("batch_size: §1k"), "write a number", in_model("batch_size: 1024")),
    "loss missing": (HEAD + '§train: {batches: "a:b"}\n', "loss is missing", HEAD + TRAIN + "}\n"),
    "unknown key in train": (
        HEAD + TRAIN + "§lr: 0.1}\n",
        "remove it, or use one of batches, loss",
        HEAD + TRAIN + "learning_rate: 0.1}\n",
    ),
    "unknown optimizer": (
        HEAD + TRAIN + "optimizer: §adma}\n",
        "did you mean adam?",
        HEAD + TRAIN + "optimizer: adagrad}\n",
    ),
    "learning rate 0": (
        HEAD + TRAIN + "learning_rate: §0}\n",
        "it must be greater than 0",
        HEAD + TRAIN + "learning_rate: 1e-3}\n",
    ),
    "ema of 1": (HEAD + TRAIN + "ema: §1}\n", "it must be less than 1", HEAD + TRAIN + "ema: 0.999}\n"),
    "negative ema": (HEAD + TRAIN + "ema: §-0.1}\n", "it must be at least 0", HEAD + TRAIN + "ema: 0}\n"),
    "no shared step": (
        HEAD + TRAIN + "shared_steps: §0}\n",
        "it must be at least 1",
        HEAD + TRAIN + "shared_steps: 1}\n",
    ),
    "batch of training 0": (
        HEAD + TRAIN + "batch_size: §0}\n",
        "it must be at least 1",
        HEAD + TRAIN + "batch_size: 1}\n",
    ),
    "learning rate of no float32": (
        HEAD + TRAIN + "learning_rate: §1e31}\n",
        "it must be at most 1e+30",
        HEAD + TRAIN + "learning_rate: 1e30}\n",
    ),
    "negative steps": (HEAD + TRAIN + "steps: §-1}\n", "it must be at least 1", HEAD + TRAIN + "steps: 1}\n"),
    # settings, at every level
    "defaults as a list": (
        HEAD + "defaults: §[]\n",
        "expected a mapping of keys to values, found a list",
        HEAD + "defaults: {}\n",
    ),
    "unknown key in defaults": (in_defaults("§fwd: {}"), "remove it, or use one of", in_defaults("fprop: {}")),
    "operand in defaults": (
        in_defaults("§weight: {}"),
        "write it under a GEMM that takes it",
        in_defaults("fprop: {weight: {}}"),
    ),
    "rule's key in defaults": (in_defaults("§match: a"), "remove it, or use one of", HEAD),
    "unknown compute": (
        in_defaults("compute: §FP8"),
        "did you mean fp8? It is one of auto, fp8, keep",
        in_defaults("compute: fp8"),
    ),
    "unknown fuse": (in_defaults("fuse: §true"), "give one of auto, always, never", in_defaults("fuse: always")),
    "unknown format": (in_defaults("format: §e4m4"), "did you mean e4m3?", in_defaults("format: e4m3")),
    "unknown scaling": (in_defaults("scaling: §row-wise"), "did you mean rowwise?", in_defaults("scaling: rowwise")),
    "unknown range": (
        in_defaults("range: §7"),
        "the number 7 is not known; give one of dynamic, static",
        in_defaults("range: dynamic"),
    ),
    "unknown accumulation": (
        in_defaults("accumulation: §slow"),
        "one of fast, precise",
        in_defaults("accumulation: fast"),
    ),
    "number for a boolean": (
        in_defaults("padding: §1"),
        "expected true or false, found the number 1",
        in_defaults("padding: true"),
    ),
    "transposed as a word": (
        in_defaults("requantize_transpose: §wgrad"),
        "expected true or false",
        in_defaults("requantize_transpose: true"),
    ),
    "transposed as a number": (
        in_defaults("wgrad: {requantize_transpose: §1}"),
        "without quotes",
        in_defaults("wgrad: {requantize_transpose: false}"),
    ),
    "transposed as a mapping": (
        in_defaults("dgrad: {weight: {requantize_transpose: §{from: fprop}}}"),
        "expected true or false, found a mapping",
        in_defaults("dgrad: {weight: {requantize_transpose: true}}"),
    ),
    "transposed fprop": (
        in_defaults("fprop: {§requantize_transpose: true}"),
        "write it site-wide, or where an operand is read along its other dimension: dgrad: {weight: ...}",
        in_defaults("dgrad: {requantize_transpose: true}"),
    ),
    "transposed operand that is read along its rows": (
        in_defaults("dgrad: {grad_output: {§requantize_transpose: true}}"),
        'unknown key "requantize_transpose" in grad_output; write it site-wide',
        in_defaults("wgrad: {grad_output: {requantize_transpose: true}}"),
    ),
    "transposed in the top level": (
        HEAD + "§requantize_transpose: true\n",
        "write it under defaults or in a rule",
        in_defaults("requantize_transpose: true"),
    ),
    "transposed misspelt": (
        in_defaults("wgrad: {§requantise_transpose: true}"),
        "did you mean requantize_transpose?",
        in_defaults("wgrad: {}"),
    ),
    "transposed with a scaling of its own": (
        in_defaults("wgrad: {input: §{requantize_transpose: true, scaling: rowwise, format: e4m3}}"),
        "takes the rest from the one it is made from; leave out format, scaling",
        in_defaults("wgrad: {input: {requantize_transpose: false, scaling: rowwise, format: e4m3}}"),
    ),
    "text for a boolean": (in_defaults('power_of_two: §"true"'), "without quotes", in_defaults("power_of_two: true")),
    "amax 0": (in_defaults("range: static, amax: §0"), "out of range", in_defaults("range: static, amax: 1.5")),
    "amax negative": (in_defaults("range: static, amax: §-1"), "out of range", in_defaults("range: static, amax: 1")),
    "amax beyond float32": (
        in_defaults("range: static, amax: §1e39"),
        "it must be at most 3.4e+38",
        in_defaults("range: static, amax: 1e38"),
    ),
    "amax as text": (
        in_defaults("range: static, amax: §inf"),
        "expected a number",
        in_defaults("range: static, amax: 448"),
    ),
    "negative MERE": (
        in_defaults("budget: {mere: §-0.1}"),
        "it must be at least 0",
        in_defaults("budget: {mere: 0.1}"),
    ),
    "negative SQNR": (
        in_defaults("budget: {sqnr_db: §-3}"),
        "it must be at least 0",
        in_defaults("budget: {sqnr_db: 3}"),
    ),
    "speed-up as a boolean": (
        in_defaults("budget: {min_speedup: §true}"),
        "expected a number",
        in_defaults("budget: {min_speedup: 1}"),
    ),
    "unknown budget": (
        in_defaults("budget: {§sqnr: 24}"),
        "did you mean sqnr_db?",
        in_defaults("budget: {sqnr_db: 24}"),
    ),
    "budget as a number": (
        in_defaults("budget: §0.2"),
        "with keys of mere, sqnr_db",
        in_defaults("budget: {mere: 0.2}"),
    ),
    "GEMM as a word": (in_defaults("fprop: §fp8"), "with keys of", in_defaults("fprop: {compute: fp8}")),
    "wrong operand": (in_defaults("dgrad: {§input: {}}"), "a GEMM that takes it", in_defaults("wgrad: {input: {}}")),
    "budget in a GEMM": (
        in_defaults("fprop: {§budget: {}}"),
        'unknown key "budget" in fprop',
        in_defaults("budget: {}"),
    ),
    "compute in an operand": (
        in_defaults("fprop: {input: {§compute: fp8}}"),
        "in input; remove it",
        in_defaults("fprop: {compute: fp8}"),
    ),
    "unknown format in an operand": (
        in_defaults("wgrad: {grad_output: {format: §e5m3}}"),
        "did you mean e5m2?",
        in_defaults("wgrad: {grad_output: {format: e5m2}}"),
    ),
    # rules and matches
    "rules as a mapping": (
        HEAD + "rules: §{match: a}\n",
        "expected a list, found a mapping; begin each item",
        HEAD + "rules: [{match: a}]\n",
    ),
    "rule as a word": (HEAD + "rules: [§a]\n", "expected a mapping of keys to values", HEAD + "rules: [{match: a}]\n"),
    "match missing": (
        in_rule("compute: fp8").replace("{c", "§{c"),
        "match is missing; add it",
        in_rule("match: a, compute: fp8"),
    ),
    "unknown key in a rule": (
        in_rule("match: a, §optionl: true"),
        "did you mean optional?",
        in_rule("match: a, optional: true"),
    ),
    "note as a number": (in_rule("match: a, note: §3"), "expected text", in_rule("match: a, note: '3'")),
    "optional as text": (
        in_rule("match: a, optional: §maybe"),
        "expected true or false",
        in_rule("match: a, optional: false"),
    ),
    "bad regex": (in_rule("match: §'re:('"), "is no regular expression (missing )", in_rule("match: 're:(a)'")),
    "empty regex": (in_rule("match: §'re:'"), 'write "*" for every site', in_rule("match: 're:.*'")),
    "empty glob": (in_rule("match: §' '"), 'write "*" for every site', in_rule("match: '*'")),
    "glob as a number": (in_rule("match: §3"), "expected a pattern, found the number 3", in_rule("match: '3'")),
    "no patterns": (in_rule("match: §[]"), "empty; give at least one", in_rule("match: [a]")),
    "number among patterns": (
        in_rule("match: [a, §3]"),
        "expected text, found the number 3",
        in_rule("match: [a, '3']"),
    ),
    "bad regex among patterns": (
        in_rule("match: [a, §'re:[']"),
        "is no regular expression",
        in_rule("match: [a, 're:[b]']"),
    ),
    "empty criteria": (in_rule("match: §{}"), 'write "*" for every site', in_rule("match: {kind: linear}")),
    "unknown kind": (in_rule("match: {kind: §liner}"), "did you mean linear?", in_rule("match: {kind: linear}")),
    "unknown criterion": (in_rule("match: {§maxn: 16}"), "did you mean max_n?", in_rule("match: {max_n: 16}")),
    "criteria that exclude each other": (
        in_rule("match: §{min_k: 8, max_k: 4}"),
        "min_k 8 is over max_k 4",
        in_rule("match: {min_k: 4, max_k: 4}"),
    ),
    "share over 1": (in_rule("match: {min_share: §5}"), "it must be at most 1", in_rule("match: {min_share: 0.05}")),
    "size 0": (in_rule("match: {max_m: §0}"), "it must be at least 1", in_rule("match: {max_m: 1}")),
    "name that is no pattern": (
        in_rule("match: {name: §{a: b}}"),
        "expected a pattern, found a mapping",
        in_rule("match: {name: [a, b]}"),
    ),
    "bad regex for a name": (
        in_rule("match: {name: [§'re:+']}"),
        "is no regular expression",
        in_rule("match: {name: 're:a+'}"),
    ),
    "empty profile": (HEAD + "profile: §''\n", "profile: empty", HEAD + "profile: profiles/a.safetensors\n"),
    "empty measurements": (HEAD + "measurements: §''\n", "measurements: empty", HEAD + "measurements: m.jsonl\n"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_at_its_place(case: str, load: Callable[..., Policy], refused: Callable[..., None]) -> None:
    text, says, _ = CASES[case]
    refused(load, text, says)


@pytest.mark.parametrize("case", CASES)
def test_control_loads(case: str, load: Callable[..., Policy]) -> None:
    assert load(CASES[case][2]).version == 1


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
