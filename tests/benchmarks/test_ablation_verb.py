"""`python -m benchmarks.ablation POLICY` on the CPU, from the command to the files, with nothing taken out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.ablation.__main__ import main
from tests.support import markdown

POLICY = """\
version: 1
name: clicks
model:
  factory: tests.support.models.ablation_model:build
  inputs: tests.support.models.ablation_model:inputs
  batch_size: 64
train:
  batches: tests.support.models.ablation_model:batches
  test: tests.support.models.ablation_model:held_out
  loss: tests.support.models.ablation_model:loss
defaults: {compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}
rules:
  - {match: "head", compute: keep}
mods:
  - {use: no_bias}
  - {use: hard_swish}
"""


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "clicks.yaml"
    path.write_text(POLICY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.slow
def test_every_subset_is_measured_in_every_column(policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["clicks.yaml", "--loss-steps", "4", "--batch", "32", "--only", "none,all", "--json"]
    assert main(arguments) == 0
    ran = capsys.readouterr()
    plain = json.loads(ran.out)
    its_own = {"policy", "modes", "columns", "rows", "cells", "targets"}
    assert set(plain) == {*markdown.json_keys("bench"), *its_own}
    assert (
        plain["command"] == "python -m benchmarks.ablation clicks.yaml --loss-steps 4 --batch 32 --only none,all --json"
    )
    assert plain["policy"] == {
        "name": "clicks",
        "factory": "tests.support.models.ablation_model:build",
        "batch_size": 32,
    }
    rows = [row["name"] for row in plain["rows"]]
    assert rows == ["none", "all"]
    assert [(cell["row"], cell["column"]) for cell in plain["cells"]] == [
        (row, column) for row in rows for column in ("compile-bf16", "loka-bf16", "loka-fp8")
    ]
    for cell in plain["cells"]:
        assert cell["failures"] == {}, cell
        assert cell["loss"]["steps"] == 4
        assert 0.3 < cell["loss"]["test"] < 1.5
        for found in cell["modes"].values():
            assert found["timing"]["median_us"] > 0
            assert found["launches"] is found["peak_mib"] is found["ratio"] is None
        assert cell["modes"]["infer"]["output_db"] > (15 if cell["column"] == "loka-fp8" else 35)
    losses = {(cell["row"], cell["column"]): cell["loss"]["test"] for cell in plain["cells"]}
    assert losses["none", "compile-bf16"] != losses["all", "compile-bf16"]  # another model
    assert abs(losses["all", "loka-bf16"] - losses["all", "compile-bf16"]) < 0.02  # the same one
    assert plain["targets"] == []
    assert "nothing of speed" in plain["notes"][0]
    data, page = sorted((policy.parent / "build" / "bench").iterdir())
    assert data.name.startswith("ablation-clicks-")
    assert json.loads(data.read_text()) == plain
    assert "## One training step, us" in page.read_text()
    assert "loka-fp8 with no_bias, hard_swish: train" in ran.err


@pytest.mark.slow
@pytest.mark.usefixtures("policy")
def test_tables_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clicks.yaml", "--modes", "infer", "--only", "all,loka-bf16", "-o", "out"]) == 0
    ran = capsys.readouterr()
    assert "| mods | compile-bf16 | loka-bf16 |" in ran.out
    assert "| all | - |" in ran.out
    assert "ne training step" not in ran.out
    assert "wrote out/ablation-clicks-" in ran.err
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_a_mistake_leaves_with_2_and_writes_nothing(policy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["other.yaml"]) == 2
    assert "other.yaml" in capsys.readouterr().err
    assert list(policy.parent.iterdir()) == [policy]
