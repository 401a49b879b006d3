"""The studies' command lines: `python -m benchmarks.NAME`, on recordings whose times are made up."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks.crossover import __main__ as crossover
from benchmarks.dispatch import __main__ as dispatch
from benchmarks.region import __main__ as region
from benchmarks.regret import __main__ as regret
from benchmarks.study import run_study
from loka.errors import CheckFailedError
from loka.kernels.measurements.lookup import Measurements
from tests.support.plan.made_recordings import MACHINE, fill, small_recording

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHARED = (
    "__init__.py",
    "cell_report.py",
    "cells.py",
    "packages.py",
    "replays.py",
    "roofline.py",
    "steps.py",
    "study.py",
    "variants.py",
)
STUDIES = sorted(
    path.stem if path.is_file() else path.name
    for path in BENCHMARKS.iterdir()
    if path.name not in ("__pycache__", *SHARED) and (path.is_dir() or path.suffix == ".py")
)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return small_recording(tmp_path / "h100.jsonl")


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_a_command_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"benchmarks.{name}.__main__" if (BENCHMARKS / name).is_dir() else f"benchmarks.{name}"
    with pytest.raises(SystemExit) as left:
        importlib.import_module(place).main(["--help"])
    assert left.value.code == 0
    assert f"python -m benchmarks.{name}" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # that the module is imported already
def test_a_study_runs_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["crossover", "nowhere.jsonl"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("benchmarks.crossover", run_name="__main__")
    assert left.value.code == 2
    printed = capsys.readouterr()
    assert "nowhere.jsonl" in printed.err
    assert printed.out == ""


def test_an_error_is_a_message_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    def failing() -> str:
        raise CheckFailedError("it did not hold")

    assert run_study(failing) == 1
    assert run_study(lambda: None) == 0
    assert run_study(lambda: "text") == 0
    assert capsys.readouterr() == ("text\n", "it did not hold\n")


@pytest.mark.slow
def test_the_map_is_written_as_a_page(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = []
    monkeypatch.setattr(crossover, "plot", lambda found, machine, path: drawn.append((machine, path.name)))
    assert crossover.main([str(recorded), "-o", str(tmp_path / "results")]) == 0
    (page,) = (tmp_path / "results").glob("crossover-*.md")
    assert drawn == [(MACHINE.device, page.name.replace(".md", ".svg"))]
    assert "GEMM alone, precise accumulation: 64 shapes: FP8 wins 64, loses 0, ties 0" in capsys.readouterr().out
    assert "driver 580.65.06" in page.read_text()
    assert "by `python -m benchmarks.crossover h100.jsonl`" in page.read_text()
    assert str(tmp_path) not in page.read_text()
    assert crossover.main([str(recorded), "-o", str(tmp_path / "results"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["GEMM"]) == 64


@pytest.mark.slow
def test_two_recordings_are_compared(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = tmp_path / "again.jsonl"
    fill(again, Measurements.open(recorded, "h100").parts, factor=1.1)
    assert regret.main([str(recorded), str(again)]) == 0
    printed = capsys.readouterr().out
    assert "0.00 %" in printed
    assert "10.00 %, 10.00 %, 10.00 %" in printed
    assert regret.main([str(recorded), str(again), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["drift"] == pytest.approx({"median": 0.1, "p95": 0.1, "most": 0.1}, rel=1e-3)
    assert [problem["flips"] for problem in plain["problems"]] == [0] * len(plain["problems"])


@pytest.mark.parametrize(
    ("study", "arguments", "message"),
    [
        (crossover, ["nowhere.jsonl"], "is not there"),
        (regret, ["nowhere.jsonl", "nowhere.jsonl"], "is not there"),
        (dispatch, ["nowhere.jsonl", "a,b"], "'a,b' is no shape"),
        (region, ["512"], "'512' is no shape"),
        (region, ["64,300", "--form", "block-norm"], "no multiple of 256"),
        (region, ["--variants", "bf15"], "--variants: there is no 'bf15'"),
        (region, [], "python -m benchmarks.region: no CUDA device is visible"),
        (dispatch, ["nowhere.jsonl", "--seconds", "nan"], "--seconds: nan is no time to work in"),
        (dispatch, ["nowhere.jsonl", "--seconds=-1"], "--seconds: -1 is no time"),
        (dispatch, ["nowhere.jsonl", "--variants", "cublas"], "there is no 'cublas'"),
    ],
)
def test_wrong_arguments_leave_with_status_two(study, arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert study.main(arguments) == 2
    assert message in capsys.readouterr().err
