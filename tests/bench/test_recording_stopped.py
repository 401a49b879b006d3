"""A recording that ran out of time does not take the place of a complete one; one that went to its end does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loka.bench.record import commands
from loka.bench.record.commands import RecordCommand
from loka.bench.record.record import Tally
from loka.kernels.measurements.lookup import Measurements, Versions
from tests.support.plan.measured_cases import HOPPER, LATER, gemm, measurement, record

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

    monkeypatch.setattr(commands, "require_gpu", lambda: None)
    monkeypatch.setattr(commands, "parts_of", lambda *_: PARTS)
    monkeypatch.setattr(commands, "run_record", run)
    monkeypatch.setattr(Versions, "here", lambda library="": replace(LATER, library=library))
    commands.record(RecordCommand("kernels", record=path), path, lambda line: None)
    assert Measurements.open(path, "h100").machine == machine
