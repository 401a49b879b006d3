"""Exported measurements: the same as in their recording, and checked as a whole."""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import replace

import pytest

from loka.devices.targets import DEVICES
from loka.errors import InputError
from loka.kernels.measurements import recording
from loka.kernels.measurements.lookup import Measurements, Recording, export
from tests.support.plan.measured_cases import HOPPER, LATER, gemm, grid, measurement, passes, quantize, record

COMMAND = "loka bench kernels --record h100.jsonl"
ODD = [
    replace(measurement(gemm(128, 64, 64), us=0.0, wrong='MERE "inf",\n 1', mere=math.inf), sqnr_db=-math.inf),
    replace(measurement(gemm(128, 128, 64), us=1 / 3), sqnr_db=math.inf, spread=0.0123456789),
    replace(measurement(gemm(128, 256, 64)), mere=None, sqnr_db=None),
]


@pytest.fixture
def exported(tmp_path):
    path = record(tmp_path / "m.jsonl", [*grid(), *passes(), *ODD])
    export(path, tmp_path / "deep" / "h100.jsonl", "h100", COMMAND)
    return tmp_path / "deep" / "h100.jsonl"


def test_it_says_the_same_as_the_recording(exported, tmp_path):
    file, text = Measurements.open(tmp_path / "m.jsonl", "h100"), Measurements.open(exported, "h100")
    assert (text.sha256, text.machine, text.date, len(text)) == (file.sha256, HOPPER, file.date, 79)
    for each in (*grid(), *passes(), *ODD):
        assert text.time(each.part) == file.time(each.part)
        assert text.error(each.part) == file.error(each.part)
        assert text.wrong_reason(each.part) == file.wrong_reason(each.part)
    assert text.wrong_reason(ODD[0].part) == ODD[0].wrong
    assert text.error(ODD[1].part) == (0.026, math.inf)
    assert text.error(ODD[2].part) is None


def test_equal_measurements_make_equal_bytes_whatever_their_order(exported, tmp_path):
    path = record(tmp_path / "again.jsonl", reversed([*grid(), *passes(), *ODD]))
    export(path, tmp_path / "h100.jsonl", "h100", COMMAND)
    first, second = exported.read_text().split("\n"), (tmp_path / "h100.jsonl").read_text().split("\n")
    assert first[2:] == second[2:]
    assert json.loads(first[1])["machine"] == json.loads(second[1])["machine"]


def test_a_measurement_is_a_line_and_a_new_one_adds_a_line(exported, tmp_path):
    lines = exported.read_text().splitlines()
    assert lines.count("[2048,256,0,2.65536,0.01,20]") == 1
    assert json.loads(lines[0])["command"] == COMMAND
    assert len(lines) == 2 + 2 + 79, "two heads, two kinds of parts"
    export(record(tmp_path / "m.jsonl", [measurement(quantize(100, 64))]), exported, "h100", COMMAND)
    assert len(set(exported.read_text().splitlines()[2:]) - set(lines)) == 1


def test_only_one_machine_is_exported(tmp_path):
    path = record(tmp_path / "m.jsonl", [measurement(gemm(64, 64, 64), us=9.0), measurement(gemm(64, 64, 128))])
    record(path, [measurement(gemm(64, 64, 64), us=7.0)], LATER)
    written = export(path, tmp_path / "h100.jsonl", "h100", COMMAND)
    found = Measurements.open(tmp_path / "h100.jsonl", "h100")
    assert (found.machine, len(found)) == (written.machine, len(written.measurements))


BROKEN = {
    "cut short": lambda text: text[: len(text) // 2],
    "cut after a line": lambda text: text[: text.rindex("[")],
    "a time edited": lambda text: text.replace("[2048,256,0,2.65536", "[2048,256,0,1.65536"),
    "a line left out": lambda text: text.replace("[2048,256,0,2.65536,0.01,20]\n", ""),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_or_edited_file_is_an_error_and_stays_as_it_is(case, exported):
    text = BROKEN[case](exported.read_text())
    exported.write_text(text)
    with pytest.raises(InputError, match="cut short or edited") as caught:
        Measurements.open(exported, "h100")
    assert str(caught.value).startswith(f"{exported}: ")
    assert exported.read_text() == text


def test_it_is_not_recorded_into(exported):
    before = exported.read_bytes()
    with pytest.raises(InputError, match="an exported file, which its checksum completes"), Recording(exported, HOPPER):
        pytest.fail("it opened")
    assert exported.read_bytes() == before


def test_an_export_for_another_device_is_none_of_the_target(exported):
    with pytest.raises(InputError, match="target h200: it has measurements of NVIDIA H100 80GB HBM3"):
        Measurements.open(exported, "h200")


def test_where_it_cannot_be_written_it_says_so(tmp_path):
    path = record(tmp_path / "m.jsonl", grid())
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match="taken: cannot be written \\(Is a directory\\)"):
        export(path, tmp_path / "taken", "h100", COMMAND)
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "taken"]


def test_a_recording_is_never_replaced_by_an_export(tmp_path):
    path = record(tmp_path / "m.jsonl", grid())
    (tmp_path / "old.sqlite").write_bytes(b"SQLite format 3\0...")
    for taken in (path, tmp_path / "old.sqlite"):
        before = taken.read_bytes()
        with pytest.raises(InputError, match="a recording stands there, which the export would replace"):
            export(path, taken, "h100", COMMAND)
        assert taken.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_nor_is_a_pipe_or_a_device(tmp_path):
    path = record(tmp_path / "m.jsonl", grid())
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe: cannot be written: it is a device or a pipe"):
        export(path, tmp_path / "pipe", "h100", COMMAND)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_what_cannot_be_exported_is_said_as_it_is(tmp_path):
    for source, says in (
        (tmp_path / "nowhere", "is not there; make it with"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        with pytest.raises(InputError) as caught:
            export(source, tmp_path / "o.jsonl", "h100", COMMAND)
        assert str(caught.value).startswith(f"{source}: {says}")
    assert not (tmp_path / "o.jsonl").exists()


def test_a_target_without_a_set_has_none(monkeypatch, exported):
    monkeypatch.setattr(recording, "DATA", exported.parent)
    assert Measurements.shipped("h200") is None
    found = Measurements.shipped("h100")
    assert (found.name, len(found)) == ("h100.jsonl of LoKA", 79)


def test_a_set_that_ships_damaged_says_that_it_came_with_loka(monkeypatch, exported):
    monkeypatch.setattr(recording, "DATA", exported.parent)
    exported.write_text(exported.read_text()[:2000])
    with pytest.raises(InputError, match=r"h100\.jsonl: cut short or edited: .* exported; it came with LoKA: install"):
        Measurements.shipped("h100")
    exported.unlink()
    exported.mkdir()
    with pytest.raises(InputError, match="cannot be read: Is a directory; it came with LoKA: install"):
        Measurements.shipped("h100")


@pytest.mark.slow
def test_every_measured_target_ships_a_set_of_its_own_device():
    targets = [spec.name for spec in DEVICES.values() if spec.measured_on]
    assert sorted(path.name for path in recording.DATA.glob("*")) == [f"{target}.jsonl" for target in targets]
    for target in targets:
        found = Measurements.shipped(target)
        assert found.machine.device == DEVICES[target].measured_on
        assert len(found) > 12_000
    assert Measurements.shipped("reference") is None
