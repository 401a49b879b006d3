"""`loka tune` from the command to the record and the plan, on the CPU in the place of a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loka.bench.tune import tune as tune_module
from loka.kernels.measurements.versions import Versions
from loka.plan.tuning.record import read_records
from tests.support import markdown
from tests.support.bench_device import TRAINED, CpuBench
from tests.support.plan.plan_costs import HOPPER
from tests.support.plan.tuned import safe_policy

POLICY = f"""\
{TRAINED}
defaults: {{compute: auto, scaling: rowwise, fuse: never}}
rules: [{{match: "layers.*", compute: keep}}]
"""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.yaml"
    safe_policy(path, POLICY)
    return path


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, short_turns: None) -> None:
    """The CPU stands in for an H100, in short turns."""
    monkeypatch.setattr(tune_module, "require_gpu", lambda verb: None)
    monkeypatch.setattr(tune_module, "TimedDevice", CpuBench)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: HOPPER.device)
    monkeypatch.setattr(Versions, "here", lambda: HOPPER)


Loka = Callable[..., Any]


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
def test_the_record_is_written_and_the_plan_names_it(loka: Loka, policy: Path) -> None:
    ran = loka("tune", str(policy), "--rounds", "3")
    assert ran.status == 0, ran.err
    (record,) = read_records(policy.parent / "profiles" / "clicks.tuned.json")
    titles = [each.title for each in record.candidates]
    assert titles[:2] == ["as planned by predicted times", "BF16 by the compiler"]
    assert record.machine == HOPPER
    assert record.step == "forward, the policy's loss, backward, adam"
    assert f"clicks: {len(titles)} candidate plans" in ran.err
    assert f"wrote {policy.parent / 'profiles/clicks.tuned.json'}; next: loka generate {policy}" in ran.out
    words = (
        "confirmed by a measured step",
        "a measured step found nothing clearly faster",
        "slower in a measured step",
    )
    assert any(text in ran.out for text in words)
    ran = loka("plan", str(policy))
    assert ran.status == 0
    assert f"(profiles/clicks.tuned.json: {record.winner})" in ran.out
    assert any(text in ran.out for text in words)
    plain = json.loads(loka("plan", str(policy), "--json").out)
    assert plain["tuned"]["step_ms"] == record.won.step_ms
    assert plain["tuned_ignored"] == ""


@pytest.mark.slow
@pytest.mark.usefixtures("hopper")
def test_json_has_the_keys_of_the_page(loka: Loka, policy: Path) -> None:
    ran = loka("tune", str(policy), "--rounds", "3", "--json")
    assert ran.status == 0, ran.err
    plain = json.loads(ran.out)
    assert sorted(plain) == sorted(set(markdown.json_keys("tune")))
    assert plain["winner"] in [each["title"] for each in plain["candidates"]]
    dry = json.loads(loka("tune", str(policy), "--dry-run", "--json").out)
    assert set(dry) == {"name", "candidates"} < set(plain)


def test_a_dry_run_measures_nothing(loka: Loka, policy: Path) -> None:
    ran = loka("tune", str(policy), "--dry-run")
    assert ran.status == 0, ran.err
    lines = [line.split() for line in ran.out.splitlines()]
    assert lines[0] == ["candidate", "FP8", "sites", "predicted", "us"]
    assert ["BF16", "by", "the", "compiler", "0", "-"] in lines
    assert not (policy.parent / "profiles" / "clicks.tuned.json").exists()


def test_without_a_gpu_it_says_what_to_do(loka: Loka, policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ran = loka("tune", str(policy))
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("loka tune: no CUDA device is visible")


@pytest.mark.usefixtures("hopper")
def test_a_damaged_record_is_told_before_anything_is_measured(loka: Loka, policy: Path) -> None:
    (policy.parent / "profiles" / "clicks.tuned.json").write_text("{")
    ran = loka("tune", str(policy))
    assert ran.status == 2
    assert "clicks.tuned.json:1:2: not a whole JSON file" in ran.err
    assert "planning the candidates" not in ran.err


@pytest.mark.usefixtures("hopper")
def test_mistakes_of_training_functions_have_their_place(loka: Loka, tmp_path: Path) -> None:
    safe_policy(tmp_path / "p.yaml", POLICY.replace(":batches", ":nothing"))
    ran = loka("tune", str(tmp_path / "p.yaml"))
    assert ran.status == 2
    assert f"{tmp_path / 'p.yaml'}:4:" in ran.err
    assert "nothing" in ran.err


@pytest.mark.slow
def test_a_record_that_does_not_hold_is_noted_once(loka: Loka, policy: Path, hopper: None, tmp_path: Path) -> None:
    assert loka("tune", str(policy), "--rounds", "3").status == 0
    policy.write_text(POLICY.replace("batch_size: 16", "batch_size: 32"))
    ran = loka("generate", str(policy), "-o", str(tmp_path / "package"))
    assert ran.status == 0
    assert ran.err.count("note: profiles/clicks.tuned.json is ignored: it has records for h100 at batch size 16") == 1
    plain = json.loads(loka("plan", str(policy), "--json").out)
    assert plain["tuned"] is None
    assert plain["tuned_ignored"].startswith("profiles/clicks.tuned.json is ignored")
