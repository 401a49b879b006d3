"""A user's mistakes: a message with its place and what to do, the right status, no traceback, nothing written."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FACTORY = '"shopmodel:build"'
INPUTS = '"shopmodel:inputs"'

# what in the policy becomes what; then the start of the message; then a word of advice in it
CALLABLES = {
    "a module that is not there": (FACTORY, '"nowhere:build"', "4:18: model.factory: there is no module", "package"),
    "a name that is not there": (FACTORY, '"shopmodel:biuld"', "4:18: model.factory: shopmodel", "'build'"),
    "not callable": (FACTORY, '"shopmodel:number"', "4:18: model.factory: shopmodel:number is of type int", "function"),
    "a factory that raises": (
        FACTORY,
        '"shopmodel:raising"',
        "4:18: model.factory: shopmodel:raising() raised",
        "shopmodel.py:",
    ),
    "no module returned": (
        FACTORY,
        '"shopmodel:no_module"',
        "4:18: model.factory: shopmodel:no_module() returned",
        "nn.Module",
    ),
    "inputs that raise": (
        INPUTS,
        '"shopmodel:raising_inputs"',
        "4:45: model.inputs: shopmodel:raising_inputs(64)",
        "shopmodel.py:",
    ),
    "inputs that do not fit": (INPUTS, '"shopmodel:wrong_inputs"', "4:8: model: the forward of Shop raised", "make"),
}
VERBS = {
    "validate": ["validate", "{policy}"],
    "plan": ["plan", "{policy}", "--json"],
    "explain": ["explain", "{policy}", "head"],
    "diff": ["diff", "{policy}", "{policy}"],
    "generate": ["generate", "{policy}"],
    "report": ["report", "{policy}"],
    "train": ["train", "{policy}"],
    "compare": ["compare", "{policy}"],
    "probe": ["probe", "{policy}"],
}


@pytest.fixture
def spread_policy(policy_text):
    """The policy with its model over two lines, so that places can be told apart."""
    return policy_text.replace("model: {factory", "model:\n       {factory")


@pytest.mark.parametrize("kind", CALLABLES)
def test_callables_that_cannot_be_used_are_placed(kind, shop, refuse, spread_policy):
    old, new, start, advice = CALLABLES[kind]
    text = spread_policy.replace(old, new)
    assert text != spread_policy
    policy = shop.write_policy(text)
    err = refuse("generate", policy)
    assert err.startswith(f"{policy}:{start}"), err
    assert advice in err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_a_policy_that_is_broken_or_missing(verb, shop, refuse, policy_text):
    policy = shop.write_policy(policy_text.replace("compute: fp8", "compute: fp9"))
    for path, start in ((policy, f"{policy}:9:12: "), ("policies/absent.yaml", "policies/absent.yaml: no such file")):
        assert refuse(*(part.format(policy=path) for part in VERBS[verb])).startswith(start)


@pytest.mark.parametrize("verb", ["plan", "validate", "explain", "doctor", "generate"])
def test_a_plan_where_a_policy_belongs_is_told_as_one(verb, shop, refuse):
    (shop.folder / "plan.json").write_text('{\n "assignments": [],\n "format": "loka.plan",\n "version": 2\n}\n')
    assert refuse(verb, "plan.json", *(("layers.0.up",) if verb == "explain" else ())) == (
        "plan.json: a plan of `loka generate`, no policy; name the policy that it was generated from (its "
        "policy_files) [LK001]\n"
    )


def test_rules_that_cannot_be_followed_are_placed(shop, refuse, policy_text):
    """A dead pattern with the nearest name, and a rule for one site that cannot run in FP8."""
    policy = shop.write_policy(policy_text.replace('"layers.*.up"', '"layers.*.upp"'))
    err = refuse("plan", policy)
    assert err.startswith(f"{policy}:13:")
    assert "up" in err
    policy = shop.write_policy(policy_text + '  - {match: "layers.0.up", fprop: {compute: fp8, format: e5m2}}\n')
    err = refuse("plan", policy)
    assert err.startswith(f"{policy}:15: rule 3: layers.0.up asks for fprop of 'layers.0.up' in FP8")
    assert "e5m2 x e5m2" in err


def test_training_callables_are_placed_too(shop, loka, refuse, policy_text):
    assert loka("generate", shop.policy).status == 0
    policy = shop.write_policy(policy_text.replace("shopmodel:loss", "shopmodel:los"))
    assert refuse("train", policy).startswith(f"{policy}:7:9: train.loss: ")


@pytest.mark.parametrize(
    ("field", "line", "kind"), [("batches", 2, "ZeroDivisionError"), ("loss", 6, "AttributeError")]
)
def test_training_callables_that_raise_are_told_without_a_traceback(field, line, kind, shop, loka, refuse, policy_text):
    shop.write_module(
        "late",
        "def batches(batch_size, seed):\n    yield 1 / 0\n\n\ndef loss(output, target):\n    return output.nope()\n",
    )
    policy = shop.write_policy(policy_text.replace(f"shopmodel:{field}", f"late:{field}"))
    assert loka("generate", policy).status == 0
    for verb in ("train", "compare", "probe"):
        err = refuse(verb, policy)
        assert re.match(rf"{policy}:\d+:\d+: train: seed \d+, step 1: training raised {kind}: ", err.splitlines()[-1])
        assert f"late.py:{line}; correct it there" in err


def test_a_fault_of_loka_in_training_keeps_its_traceback(shop, loka, monkeypatch):
    assert loka("generate", shop.policy).status == 0
    monkeypatch.setattr("loka.bench.quality.training.scalar", None)
    with pytest.raises(TypeError, match="not callable"):
        loka("train", shop.policy)


@pytest.mark.parametrize(
    ("removed", "start"),
    [
        ('  test: "shopmodel:test_batches"\n', "policies/shop.yaml:5:3: train.test is missing"),
        (
            'train:\n  batches: "shopmodel:batches"\n  test: "shopmodel:test_batches"\n  loss: "shopmodel:loss"\n',
            "policies/shop.yaml:1:1: the policy has no train section; add",
        ),
    ],
)
def test_training_without_what_it_needs_says_what_to_add(removed, start, shop, loka, policy_text):
    assert removed in policy_text
    policy = shop.write_policy(policy_text.replace(removed, ""))
    for verb in ("train", "compare"):
        ran = loka(verb, policy)
        assert ran.status == 2
        assert ran.err.startswith(start)


@pytest.mark.parametrize(
    "arguments",
    [
        ["plann"],
        ["plan"],
        ["plan", "a.yaml", "--nonsense"],
        ["compare", "a.yaml", "--seeds", "0"],
        ["compare", "a.yaml", "--seeds", "many"],
        ["train", "a.yaml", "--steps", "0"],
        ["init"],
        ["init", "a:b", "--batch-size", "0"],
    ],
)
def test_wrong_usage_leaves_with_2(arguments, refuse):
    refuse(*arguments)


def test_a_device_that_is_not_there(shop, loka, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, word in (("cuda", "no GPU"), ("tpu", "must be one of")):
        ran = loka("train", shop.policy, "--device", device)
        assert ran.status == 2
        assert word in ran.err


def test_output_that_cannot_be_written_is_a_message(shop, refuse):
    (shop.folder / "generated").write_text("a file, not a folder")
    refuse("generate", shop.policy)
    refuse("schema", "-o", "generated/x/schema.json")


def test_an_error_is_one_line_however_long(shop, loka, policy_text):
    policy = shop.write_policy(policy_text.replace("shopmodel:build", "shopmodel:" + "b" * 500))
    ran = loka("plan", policy)
    assert ran.status == 2
    assert ran.err.count("\n") == 1


def test_a_fault_of_the_program_is_told_with_its_place_and_keeps_its_traceback(shop, loka, monkeypatch):
    from loka.plan import planner

    told: list[str] = []
    monkeypatch.setattr("loka.cli.main.note", told.append)
    monkeypatch.setattr(planner, "planned", None)
    with pytest.raises(TypeError, match="not callable"):
        loka("plan", shop.policy)
    assert re.fullmatch(r"an error of LoKA's own, at .*verbs/plan\.py:\d+: report it with the traceback.*", *told)


def test_an_interrupt_leaves_with_130(shop, loka, monkeypatch):
    from loka.plan import planner

    def interrupted(path, gains, prospects, progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(planner, "planned", interrupted)
    ran = loka("plan", shop.policy)
    assert (ran.status, ran.out, ran.err) == (130, "", "interrupted\n")


def test_a_reader_that_goes_away_is_no_error():
    code = "from loka.cli.main import run; run()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 141
    assert errors == ""


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_in_a_real_process_leaves_without_a_traceback(shop):
    slow = "import time\nopen('here', 'w').close()\ntime.sleep(60)\n"
    (shop.folder / "slowmodel.py").write_text(slow)
    policy = shop.write_policy(
        "version: 1\nname: slow\nmodel: {factory: 'slowmodel:build', inputs: 'slowmodel:inputs'}\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "loka", "plan", policy],
        cwd=shop.folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stderr=subprocess.PIPE,
        text=True,
        # a shell that runs the tests in its background hands down a SIGINT that is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not (shop.folder / "here").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "interrupted\n"
