"""Recordings: what they are of, what is known of them, and which takes the place of another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loka.bench.record import run_record
from loka.bench.record.record import Tally
from loka.bench.record.run_record import parts_of
from loka.kernels.measurements.lookup import Measurements, Versions
from loka.kernels.measurements.parts import Part, PartKind, TimeSource
from tests.support.plan.made_recordings import fill, small_recording
from tests.support.plan.measured_cases import HOPPER, LATER, gemm, measurement, record


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
    assert 16384 in rows
    gemms = parts_of(("gemm",), Path("policies/ranker.yaml"))
    assert set(gemms) == {part for part in parts if part.work is PartKind.GEMM}
    assert len(set(parts)) == len(parts)


PARTS = (gemm(64, 64, 64), gemm(64, 64, 128))


@pytest.mark.parametrize(
    ("tally", "machine"),
    [
        (Tally(measured=1, known=0, wrong=0, failed=0), HOPPER),
        (Tally(measured=1, known=1, wrong=0, failed=0), LATER),
        (Tally(measured=1, known=0, wrong=1, failed=1), LATER),
    ],
)
def test_only_what_asked_for_every_part_came_to_its_end(tally, machine, tmp_path, monkeypatch):
    path = record(tmp_path / "m.jsonl", map(measurement, PARTS))

    def run(store, *_):
        store.add(measurement(PARTS[0]))
        return tally

    monkeypatch.setattr(run_record, "require_gpu", lambda: None)
    monkeypatch.setattr(run_record, "parts_of", lambda *_: PARTS)
    monkeypatch.setattr(run_record, "run_record", run)
    monkeypatch.setattr(Versions, "here", lambda library="": replace(LATER, library=library))
    run_record.record_into(path, (), None, lambda line: None, 60.0, 1)
    assert Measurements.open(path, "h100").machine == machine
