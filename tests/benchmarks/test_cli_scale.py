"""The scale benchmark's parts; the whole of it is run by hand: python -m benchmarks.cli_scale."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.cli_scale import (
    LAYERS,
    POLICY,
    Run,
    ScaleCosts,
    Tower,
    run_process,
    table,
    ten_thousand,
    ten_thousand_inputs,
)
from loka.errors import CheckFailedError


@pytest.mark.slow
def test_the_model_has_ten_thousand_linear_layers() -> None:
    with torch.device("meta"):
        model = ten_thousand()
    assert sum(isinstance(module, nn.Linear) for module in model.modules()) == LAYERS == 10_000


def test_a_short_tower_runs_on_the_inputs() -> None:
    (x,) = ten_thousand_inputs(3)
    assert Tower(4, 64)(x).shape == (3, 64)


def test_a_process_is_timed_and_its_memory_seen(tmp_path: Path) -> None:
    program = "import time, os; block = b'x' * 100_000_000; time.sleep(0.2); print(os.getcwd())"
    run, printed = run_process("one", [sys.executable, "-c", program], tmp_path)
    assert 0.2 < run.seconds < 30
    assert 95 < run.peak_mib < 400
    assert Path(printed.strip()).resolve() == tmp_path.resolve()


def test_memory_is_that_of_the_process_and_not_of_an_earlier_one(tmp_path: Path) -> None:
    big, _ = run_process("big", [sys.executable, "-c", "block = b'x' * 200_000_000"], tmp_path)
    small, _ = run_process("small", [sys.executable, "-c", "pass"], tmp_path)
    assert small.peak_mib < big.peak_mib - 100


def test_a_process_that_fails_is_reported_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(CheckFailedError, match=r"(?s)loka plan left with status 3.*no such policy"):
        run_process("loka plan", [sys.executable, "-c", "import sys; print('no such policy'); sys.exit(3)"], tmp_path)


def test_the_table_takes_building_the_model_off() -> None:
    costs = ScaleCosts((Run("loka --help", 0.2, 30.0), Run("loka plan", 5.0, 900.0)), 1.5, 0.5)
    help_line, plan_line = table(costs).splitlines()[2:]
    assert help_line.split() == ["loka", "--help", "0.20", "30"]
    assert plan_line.split() == ["loka", "plan", "5.00", "4.50", "900"]


def test_the_policy_is_one_that_loads(tmp_path: Path) -> None:
    from loka.mods.policy_loader import load_policy

    path = tmp_path / "ten_thousand.yaml"
    path.write_text(POLICY, encoding="utf-8")
    assert load_policy(path).name == "ten_thousand"
