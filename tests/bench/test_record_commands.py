"""`loka bench kernels --record` and `--export`, on a file of made-up measurements."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from loka.bench.record.commands import RecordCommand, carry_out
from loka.bench.record.run_record import parts_of
from loka.errors import InputError
from loka.kernels.measurements.lookup import Measurements
from loka.kernels.measurements.parts import Part, PartKind, TimeSource
from tests.support.plan.made_recordings import fill, small_recording


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    return small_recording(tmp_path / "h100.jsonl")


def test_what_was_recorded_can_be_planned_by_and_is_not_measured_again(recorded: Path) -> None:
    part = Part(PartKind.GEMM, "torch.scaled_mm", 512, 256, 128, recipe="e4m3 rowwise, e4m3 rowwise, fast")
    known = Measurements.open(recorded, "h100")
    timed = known.time(part)
    assert timed is not None
    assert timed.source is TimeSource.MEASURED
    assert timed.us == pytest.approx(1.0 + 512 * 256 * 128 / 2e6, rel=1e-5)
    assert known.error(part) == (0.17, 28.5)
    assert fill(recorded, [part]) == []


def test_measurements_are_exported_without_a_gpu(recorded: Path, tmp_path: Path) -> None:
    text = tmp_path / "exported.jsonl"
    outcome = carry_out(RecordCommand("kernels", (str(recorded),), export=text), print)
    assert "measurements on NVIDIA H100 80GB HBM3" in outcome.text
    assert '"loka bench kernels --record h100.jsonl"' in text.read_text().splitlines()[0]
    assert Measurements.open(text, "h100").sha256 == Measurements.open(recorded, "h100").sha256


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (RecordCommand("region", record=Path("x")), "are for `loka bench kernels`"),
        (RecordCommand("kernels", ("gemm",), record=Path("x")), "name kinds of parts with --parts, not 'gemm'"),
        (RecordCommand("kernels", (), record=Path("x"), parts="gemms"), "no parts of the kind 'gemms'"),
        (RecordCommand("kernels", (), policy=Path("x")), "name the file with --record"),
        (RecordCommand("kernels", (), export=Path("x")), "name the one file of measurements"),
        (RecordCommand("kernels", ("nowhere.jsonl",), export=Path("x")), "is not there"),
        (
            RecordCommand("kernels", ("a",), export=Path("x"), target=""),
            "nothing is measured for ''; write h100 or h200",
        ),
        (
            RecordCommand("kernels", ("nowhere.jsonl",), export=Path("x"), target="reference"),
            "measured for 'reference'",
        ),
        (RecordCommand("kernels", record=Path("x"), seconds=math.nan), "--seconds: nan is no time to work in"),
        (RecordCommand("kernels", record=Path("x"), seconds=-1), "--seconds: -1 is no time"),
    ],
)
def test_commands_that_are_not_right_say_so(command: RecordCommand, message: str) -> None:
    with pytest.raises(InputError, match=message):
        carry_out(command, print)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nothing_is_recorded_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no CUDA device is visible"):
        carry_out(RecordCommand("kernels", record=tmp_path / "none.jsonl"), print)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_parts_of_a_policy_are_those_that_its_plan_asks_for(tmp_path: Path) -> None:
    parts = parts_of((), Path("policies/ranker.yaml"))
    assert {part.work for part in parts} >= {
        PartKind.GEMM,
        PartKind.QUANTIZE,
        PartKind.REQUANTIZE_TRANSPOSE,
        PartKind.FORWARD,
        PartKind.BACKWARD,
    }
    rows = {part.rows for part in parts if part.work is PartKind.GEMM and part.kernel == "torch.scaled_mm"}
    assert 4096 in rows
    gemms = parts_of(("gemm",), Path("policies/ranker.yaml"))
    assert set(gemms) == {part for part in parts if part.work is PartKind.GEMM}
    assert len(set(parts)) == len(parts)
