"""Plans that a record of `loka tune` confirms, records that no longer hold, and files that are none."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from loka.codegen.generation import generate
from loka.devices.spec import Execution
from loka.errors import CheckFailedError, IgnoredWarning, InputError
from loka.mods.policy_loader import load_policy
from loka.plan.format import describe_tuned
from loka.plan.plan import Plan
from loka.plan.planner import make_plan, planned
from loka.plan.tuning.candidates import NATIVE_TITLE, STANDING_TITLE
from loka.plan.tuning.record import TunedKey, TunedRecord, read_records
from loka.policy.policy import Policy
from loka.probe.profile.profile_file import load, save
from tests.support.plan.tuned import MadeUpSteps, keep, safe_policy, tune

MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.down = nn.Linear(WIDTH, 64)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.norm(self.up(x))))


WIDTH = 128


def inputs(batch_size):
    return (torch.randn(batch_size, 64),)
"""
POLICY = """\
version: 1
name: tuned
model: {factory: "tunedmodel:Model", inputs: "tunedmodel:inputs", batch_size: 64}
defaults: {compute: auto, scaling: auto}
"""
FORCED = "FP8 wherever it is safe, rowwise"
FASTER = MadeUpSteps({FORCED: 2.5, "as planned": 3.5}, usual=5.0)
NATIVE = MadeUpSteps({}, usual=5.0)
RECORDS: list[TunedRecord] = []
PROFILES: list[bytes] = []


@dataclass(frozen=True)
class Tuned:
    """A policy in a folder, and how to tune and change it."""

    folder: Path

    @property
    def policy(self) -> Policy:
        return load_policy(self.folder / "p.yaml")

    def tune(self, steps: MadeUpSteps) -> TunedRecord:
        record = tune(self.policy, steps)
        keep(self.policy, record)
        return record

    def by_faster(self) -> TunedRecord:
        """The record of FASTER, made for the first test that asks for it."""
        if not RECORDS:
            RECORDS.append(tune(self.policy, FASTER))
        keep(self.policy, RECORDS[0])
        return RECORDS[0]

    def write(self, old: str, new: str, file: str = "p.yaml") -> None:
        path = self.folder / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        sys.modules.pop("tunedmodel", None)

    def ignored(self) -> tuple[Plan, str]:
        """The plan, and the warning that it comes with."""
        with pytest.warns(IgnoredWarning) as told:
            plan = make_plan(self.policy)
        (warning,) = told
        assert plan.tuned is None
        return plan, str(warning.message)


@pytest.fixture
def tuned(write_module) -> Tuned:
    """With a profile that the first test makes."""
    folder = write_module("tunedmodel", MODEL)
    profile = folder / "profiles" / "tuned.safetensors"
    if PROFILES:
        (folder / "p.yaml").write_text(POLICY)
        profile.parent.mkdir()
        profile.write_bytes(PROFILES[0])
    else:
        safe_policy(folder / "p.yaml", POLICY)
        PROFILES.append(profile.read_bytes())
    return Tuned(folder)


def test_a_plan_is_that_of_the_winner_and_says_so(tuned: Tuned) -> None:
    before = make_plan(tuned.policy)
    record = tuned.by_faster()
    assert record.winner == FORCED
    plan = make_plan(tuned.policy)
    assert plan.tuned is not None
    assert {site.history["scaling"][-1].value for site in plan.sites} == {"rowwise"}
    assert {site.history["scaling"][-1].source for site in plan.sites} == {"a measured step"}
    assert {site.history["scaling"][-1].value for site in before.sites} != {"rowwise"}
    said = describe_tuned(plan.tuned)
    assert said == (
        "confirmed by a measured step: 2.5 ms against 4 ms of BF16 (reduce-overhead) "
        "on NVIDIA H100 80GB HBM3, 2026-11-23"
    )


def test_where_bf16_is_fastest_the_plan_has_no_fp8(tuned: Tuned) -> None:
    assert make_plan(tuned.policy).share_fp8 > 0
    assert tuned.tune(NATIVE).winner == NATIVE_TITLE
    plan = make_plan(tuned.policy)
    assert plan.share_fp8 == 0
    assert plan.bindings == ()
    assert {gemm.reason for site in plan.sites for gemm in site.gemms} == {"keep by profiles/tuned.tuned.json"}
    assert plan.tuned is not None
    assert describe_tuned(plan.tuned) == (
        "a measured step found nothing clearly faster than 4 ms of BF16 (reduce-overhead) "
        "on NVIDIA H100 80GB HBM3, 2026-11-23; FP8 took 5 ms at best"
    )
    assert planned(tuned.policy, prospects=True).prospect is None


def test_a_gain_within_the_noise_is_said_with_it(tuned: Tuned) -> None:
    tuned.tune(MadeUpSteps({}, usual=3.8, uneven=0.2))
    plan = make_plan(tuned.policy)
    assert plan.tuned is not None
    assert plan.tuned.is_native
    assert re.search(r"; FP8 took 3\.8 ms at best: 1\.05x, with a noise of \d\d\.\d %$", describe_tuned(plan.tuned))


def test_the_plan_as_it_stands_is_confirmed_too(tuned: Tuned) -> None:
    before = make_plan(tuned.policy)
    assert tuned.tune(MadeUpSteps({STANDING_TITLE: 2.0}, usual=5.0)).winner == STANDING_TITLE
    plan = make_plan(tuned.policy)
    assert plan.tuned is not None
    assert replace(plan, tuned=None) == before


@pytest.mark.slow
def test_a_package_is_stale_once_its_record_changes(tuned: Tuned) -> None:
    record = tuned.by_faster()
    made = generate(tuned.policy, tuned.folder / "package")
    manifest = json.loads((made.folder / "manifest.json").read_text())
    assert manifest["inputs"]["tuned profiles/tuned.tuned.json"] == record.sha256
    generate(tuned.policy, made.folder, check=True)
    keep(tuned.policy, replace(record, bf16_ms=4.5))
    with pytest.raises(CheckFailedError, match=r"manifest\.json: stale"):
        generate(tuned.policy, made.folder, check=True)
    tuned.policy.tuned_file.unlink()
    with pytest.raises(CheckFailedError, match=r"plan\.json: stale"):
        generate(tuned.policy, made.folder, check=True)


def test_a_note_or_another_order_in_the_policy_leaves_the_record(tuned: Tuned) -> None:
    tuned.by_faster()
    tuned.write("defaults:", 'rules: [{match: "up", note: "the first"}]\n# why\ndefaults:')
    with warnings.catch_warnings():
        warnings.simplefilter("error", IgnoredWarning)
        assert make_plan(tuned.policy).tuned is not None


@pytest.mark.parametrize(
    ("old", "new", "file", "reason"),
    [
        ("batch_size: 64", "batch_size: 128", "p.yaml", "it has records for h100 at batch size 64, execution "
         "reduce-overhead, and this policy is for h100 at batch size 128"),
        ("defaults:", "execution: {mode: graph}\ndefaults:", "p.yaml", "and this policy is for h100 at batch size 64, "
         "execution graph"),
        ("defaults:", "target: h200\ndefaults:", "p.yaml", "and this policy is for h200"),
        ("scaling: auto", "scaling: rowwise", "p.yaml", "the policy asks for something else"),
        ("scaling: auto", "scaling: auto, budget: {mere: 0.1}", "p.yaml", "the policy asks for something else"),
        ("defaults:", "mods: [{use: fuse_interaction, optional: true}]\ndefaults:", "p.yaml",
         "the policy asks for something else"),
        ("self.norm = nn.LayerNorm(WIDTH)", "self.norm = nn.BatchNorm1d(WIDTH)", "tunedmodel.py",
         "the model has changed"),
        ("silu(self.norm(self.up(x)))", "relu(self.norm(self.up(x)))", "tunedmodel.py",
         "the model's code or the kernels' times have changed"),
    ],
)  # fmt: skip
def test_what_a_record_was_not_measured_for_is_said_and_planned_by_prediction(
    tuned: Tuned, old: str, new: str, file: str, reason: str
) -> None:
    tuned.by_faster()
    tuned.write(old, new, file)
    plan, said = tuned.ignored()
    assert said.startswith("profiles/tuned.tuned.json is ignored: ")
    assert reason in said
    assert said.endswith(f"run loka tune {tuned.folder}/p.yaml, or remove it")
    tuned.policy.tuned_file.unlink()
    assert make_plan(tuned.policy) == plan


def test_another_profile_and_another_loka_end_a_record(tuned: Tuned) -> None:
    record = tuned.by_faster()
    keep(tuned.policy, replace(record, inputs=replace(record.inputs, loka="0.0.1")))
    assert "it was measured with LoKA 0.0.1, and this is" in tuned.ignored()[1]
    keep(tuned.policy, record)
    path = tuned.folder / tuned.policy.default_profile
    save(path, replace(load(path), created="2026-02-02T00:00:00Z"))  # type: ignore[type-var]
    assert "the profile has changed" in tuned.ignored()[1]


def test_a_file_has_a_record_for_each_batch_size(tuned: Tuned) -> None:
    first = tuned.by_faster()
    second = replace(first, key=TunedKey("h100", 128, Execution.COMPILED))
    keep(tuned.policy, second)
    keep(tuned.policy, replace(first, bf16_ms=4.25))
    assert [(each.key.batch_size, each.bf16_ms) for each in read_records(tuned.policy.tuned_file)] == [
        (128, 4.0), (64, 4.25),
    ]  # fmt: skip
    assert make_plan(tuned.policy).tuned is not None


def no_winner(text: str) -> str:
    return text.replace(f'"winner": "{FORCED}"', '"winner": "nobody"')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "not a whole JSON file"),
        (lambda text: "[]", "no record of loka tune"),
        (lambda text: text.replace('"version": 2', '"version": 3'), "version 3 and this LoKA reads 2: "),
        (
            lambda text: text.replace('"batch_size": 64', '"batch_size": "64"'),
            r"damaged at records\.0\.key\.batch_size",
        ),
        (lambda text: text.replace('"bf16_ms": 4.0', '"bf16_ms": -4.0'), r"damaged at records\.0\.bf16_ms"),
        (no_winner, "its winner is none of the measured candidates"),
        (lambda text: "\udcff", "not a text in UTF-8"),
    ],
)
def test_a_damaged_record_is_an_error(tuned: Tuned, change: Callable[[str], str], message: str) -> None:
    tuned.by_faster()
    path = tuned.policy.tuned_file
    path.write_bytes(change(path.read_text()).encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=message) as error:
        make_plan(tuned.policy)
    assert "tuned.tuned.json" in str(error.value)
    assert "loka tune" in str(error.value)
