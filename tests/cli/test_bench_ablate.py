"""`loka bench model POLICY --ablate mods` on the CPU, from the command to the files, with nothing taken out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
  - {use: block_norm, block: 16}
  - {use: hard_swish}
"""


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "clicks.yaml"
    path.write_text(POLICY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.slow
def test_every_subset_is_measured_in_every_column(loka: Callable[..., Any], policy: Path) -> None:
    ran = loka("bench", "model", "clicks.yaml", "--ablate", "mods", "--loss-steps", "4", "--batch", "32", "--json")
    assert ran.status == 0
    plain = json.loads(ran.out)
    its_own = {"policy", "modes", "columns", "rows", "cells", "targets"}
    assert set(plain) == {*markdown.json_keys("bench"), *its_own}
    assert plain["command"] == "loka bench model clicks.yaml --ablate mods --batch 32 --loss-steps 4"
    assert plain["policy"] == {
        "name": "clicks",
        "factory": "tests.support.models.ablation_model:build",
        "batch_size": 32,
    }
    rows = [row["name"] for row in plain["rows"]]
    assert rows == [
        "none", "all", "no_bias", "block_norm", "hard_swish", "all-no_bias", "all-block_norm", "all-hard_swish",
    ]  # fmt: skip
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
    assert "loka-fp8 with no_bias, block_norm, hard_swish: train" in ran.err


@pytest.mark.slow
@pytest.mark.usefixtures("policy")
def test_tables_are_printed(loka: Callable[..., Any], tmp_path: Path) -> None:
    arguments = ("model", "clicks.yaml", "--ablate", "mods", "--modes", "infer", "--only", "all,loka-bf16", "-o", "out")
    ran = loka("bench", *arguments)
    assert ran.status == 0
    lines = [line.split() for line in ran.out.splitlines()]
    assert ["mods", "compile-bf16", "loka-bf16"] in lines
    assert any(line[:1] == ["all"] and line[1:2] == ["-"] and len(line) == 3 for line in lines)
    assert "one training step" not in ran.out
    assert "wrote out/ablation-clicks-" in ran.err
    assert len(list((tmp_path / "out").iterdir())) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("clicks.yaml", "--ablate", "rules"), "--ablate: there is no 'rules' to ablate; write --ablate mods"),
        (("clicks.yaml", "--jobs", "4"), "--jobs goes with --record or --ablate; add one, or leave --jobs out"),
        (("clicks.yaml", "--ablate", "mods", "--rounds", "2"), "--rounds says nothing to --ablate"),
        (("clicks.yaml", "--ablate", "mods", "--form", "block-norm"), "--form says nothing to --ablate"),
        (("clicks.yaml", "--ablate", "mods", "--only", "every"), "no row or column 'every'"),
        (("other.yaml", "--ablate", "mods"), "other.yaml"),
    ],
)
def test_mistakes_leave_with_2_and_write_nothing(
    loka: Callable[..., Any],
    policy: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    ran = loka("bench", "model", *arguments)
    assert ran.status == 2
    assert message in ran.err
    assert list(policy.parent.iterdir()) == [policy]
