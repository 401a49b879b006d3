"""Steps from a file of `loka bench model`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loka.bench.report.measured_steps import measured_steps
from loka.errors import InputError
from tests.support.markdown import REPOSITORY
from tests.support.plan.report_plans import plan_of_sites, site_plan

PLAN = replace(plan_of_sites(site_plan("a")), name="wukong_small", batch_size=16384)
SHIPPED = REPOSITORY / "docs" / "results" / "model-wukong_small-2026-11-23.json"


def test_steps_are_sorted_within_their_launch() -> None:
    found = measured_steps(SHIPPED, PLAN)
    assert (found.device, found.batch_size, found.file) == ("NVIDIA H200", 16384, SHIPPED.name)
    loop = [step for step in found.steps if step.launch == "loop"]
    assert found.steps[: len(loop)] == tuple(loop)
    assert [step.variant for step in loop][:1] == ["loka-fp8"]
    assert [step.step_ms for step in loop] == sorted(step.step_ms for step in loop)
    assert (found.longest, found.baseline) == (max(step.step_ms for step in found.steps), "bf16")


def test_another_model_is_refused() -> None:
    with pytest.raises(InputError, match="has wukong_small, and the policy is ranker; measure it"):
        measured_steps(SHIPPED, replace(PLAN, name="ranker"))


def test_steps_at_another_batch_size_keep_theirs() -> None:
    assert measured_steps(SHIPPED, replace(PLAN, batch_size=64)).batch_size == 16384


def edited(change: str, value: Any) -> str:
    data = json.loads(SHIPPED.read_text(encoding="utf-8"))
    if change == "lines":
        data["models"][0]["lines"] = value
    else:
        data[change] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mine", "not a file of `loka bench model`"),
        ("[" * 100_000, "not a file of `loka bench model`"),
        (edited("what", "kernels"), "not a file of `loka bench model`"),
        (edited("models", 3), "not a file of `loka bench model`"),
        (edited("models", []), "has no model"),
        (edited("lines", []), "no training step of wukong_small was measured"),
        (edited("lines", [{"mode": "train", "failure": "", "step_ms": 0}]), "no training step"),
    ],
)
def test_other_files_are_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=said):
        measured_steps(path, PLAN)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--measured: .*missing\.json: cannot be read"):
        measured_steps(tmp_path / "missing.json", PLAN)
