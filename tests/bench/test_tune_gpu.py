"""`loka tune` of small models on a Hopper GPU: candidates are compiled, timed, and the winner confirms the plan."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from loka.bench.child_processes import child_processes
from loka.bench.tune.tune import TuneLimits, tuned_here
from loka.bench.tune.tune_steps import TimedDevice
from loka.codegen.generation import generate
from loka.devices.targets import device_named
from loka.errors import CheckFailedError, InputError
from loka.mods.policy_loader import load_policy
from loka.plan.examine import assumed_safe, examine
from loka.plan.planner import make_plan
from loka.plan.tuning.candidates import Candidates
from loka.plan.tuning.record import TunedRecord, read_records, with_record
from loka.policy.policy import Policy
from loka.probe.profile.profile_file import save
from tests.support.gpu import ON_HOPPER
from tests.support.processes import tune_worker

pytestmark = [*ON_HOPPER, pytest.mark.timing]

MODELS = "tests.support.models.ablation_model"
POLICY = """\
version: 1
name: clicks
model: {{factory: "{models}:wide", inputs: "{models}:wide_inputs", batch_size: 16384}}
target: {target}
{more}
defaults: {{compute: auto, scaling: auto}}
"""


@pytest.fixture(autouse=True)
def no_shipped_measurements() -> None:
    """Those that ship decide here, as they do for a user."""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of policies; models are found from the checkout."""
    monkeypatch.chdir(Path(__file__).parents[2])
    return tmp_path


def policy_in(folder: Path, target: str, more: str = "") -> Policy:
    """A policy whose profile finds everything safe."""
    path = folder / "clicks.yaml"
    path.write_text(POLICY.format(models=MODELS, target=target, more=more))
    examined = examine(load_policy(path))
    profile = replace(assumed_safe(examined).profile, created="2026-01-01T00:00:00Z")
    save(folder / "profiles" / "clicks.safetensors", profile)
    return load_policy(path)


def here() -> str:
    found = device_named(torch.cuda.get_device_name())
    assert found is not None
    return found.name.lower()


def kept(policy: Policy, record: TunedRecord) -> None:
    policy.tuned_file.write_text(with_record(read_records(policy.tuned_file), record))


@pytest.mark.parametrize(
    "more", ["", "execution: {mode: compiled}", "execution: {mode: graph}"], ids=["unsaid", "compiled", "graph"]
)
def test_a_measured_step_confirms_the_plan(written: Path, more: str) -> None:
    policy = policy_in(written, here(), more)
    record = tuned_here(policy, TuneLimits(150, 4), True, print)
    assert [each.title for each in record.candidates if each.failure not in ("", "no time was left")] == []
    timed = [each for each in record.candidates if each.step_ms is not None]
    assert len(timed) >= 4
    assert any(each.sites_fp8 for each in timed)
    assert record.bf16_ms > 0
    kept(policy, record)
    plan = make_plan(policy)
    assert plan.tuned is not None
    assert (plan.tuned.step_ms, plan.tuned.choice) == (record.won.step_ms, record.winner)
    generate(policy, written / "package")
    generate(policy, written / "package", check=True)
    kept(policy, replace(record, bf16_ms=2 * record.bf16_ms))
    with pytest.raises(CheckFailedError, match="stale"):
        generate(policy, written / "package", check=True)


def test_candidates_are_compiled_ahead_in_other_processes(written: Path, tmp_path: Path) -> None:
    policy = policy_in(written, here())
    candidates = [each for each in Candidates(policy).found() if each.plan.bindings][:4]
    with child_processes() as start:
        process = start(tune_worker.measure, policy, candidates, TimedDevice(), str(tmp_path))
        found: Any = process.received(time.monotonic() + 300)
    lookups, failures = found
    for lookup in lookups:
        print(*lookup)  # with the seconds that preparing each took
    assert set(failures.values()) == {""}
    assert f"{len(candidates)} of {len(candidates)} are compiled" in lookups[2][0]
    prepared = lookups[3 : 3 + len(candidates)]
    assert [(hits > 0, misses) for _, hits, misses in prepared] == [(True, 0)] * len(candidates)


def test_another_target_is_refused(written: Path) -> None:
    other = "h200" if here() == "h100" else "h100"
    with pytest.raises(InputError, match="whose times do not hold there"):
        tuned_here(policy_in(written, other), TuneLimits(60), True, print)
