"""Measurements as text: the same as in the file that they were exported from, and checked line by line."""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import replace

import pytest

from loka.devices.targets import DEVICES, GPU_TARGETS
from loka.errors import InputError
from loka.kernels.measurements import text_file
from loka.kernels.measurements.lookup import Measurements, export
from tests.support.plan.measured_cases import HOPPER, LATER, gemm, grid, measurement, passes, quantize, record

COMMAND = "loka bench kernels --record h100.sqlite"
ODD = [
    replace(measurement(gemm(128, 64, 64), us=0.0, wrong='MERE "inf",\n 1', mere=math.inf), sqnr_db=-math.inf),
    replace(measurement(gemm(128, 128, 64), us=1 / 3), sqnr_db=math.inf, spread=0.0123456789),
    replace(measurement(gemm(128, 256, 64)), mere=None, sqnr_db=None),
]


@pytest.fixture
def exported(tmp_path):
    path = record(tmp_path / "m.sqlite", [*grid(), *passes(), *ODD])
    export(path, tmp_path / "deep" / "h100.jsonl", "h100", COMMAND)
    return tmp_path / "deep" / "h100.jsonl"


def test_the_text_says_the_same_as_the_file(exported, tmp_path):
    file, text = Measurements.open(tmp_path / "m.sqlite", "h100"), Measurements.open(exported, "h100")
    assert (text.sha256, text.machine, text.date, len(text)) == (file.sha256, HOPPER, file.date, 79)
    for each in (*grid(), *passes(), *ODD):
        assert text.time(each.part) == file.time(each.part)
        assert text.error(each.part) == file.error(each.part)
        assert text.wrong_reason(each.part) == file.wrong_reason(each.part)
    assert text.wrong_reason(ODD[0].part) == ODD[0].wrong
    assert text.error(ODD[1].part) == (0.026, math.inf)
    assert text.error(ODD[2].part) is None


def test_equal_measurements_make_equal_bytes_whatever_their_order(exported, tmp_path):
    before = exported.read_bytes()
    path = record(tmp_path / "again.sqlite", reversed([*grid(), *passes(), *ODD]))
    export(path, tmp_path / "again.jsonl", "h100", COMMAND)
    first, second = before.decode().split("\n"), (tmp_path / "again.jsonl").read_text().split("\n")
    assert first[2:] == second[2:]
    assert json.loads(first[1])["machine"] == json.loads(second[1])["machine"]


def test_a_measurement_is_a_line_and_a_new_one_adds_a_line(exported, tmp_path):
    lines = exported.read_text().splitlines()
    assert lines.count("[2048,256,0,2.65536,0.01,20]") == 1
    assert json.loads(lines[0])["command"] == COMMAND
    assert len(lines) == 2 + 2 + 79, "two heads, two kinds of parts"
    path = record(tmp_path / "m.sqlite", [measurement(quantize(100, 64))])
    export(path, exported, "h100", COMMAND)
    assert len(set(exported.read_text().splitlines()[2:]) - set(lines)) == 1


def test_only_one_machine_is_exported(tmp_path):
    path = record(tmp_path / "m.sqlite", [measurement(gemm(64, 64, 64), us=9.0), measurement(gemm(64, 64, 128))])
    record(path, [measurement(gemm(64, 64, 64), us=7.0)], LATER)
    written = export(path, tmp_path / "m.jsonl", "h100", COMMAND)
    found = Measurements.open(tmp_path / "m.jsonl", "h100")
    assert (found.machine, len(found)) == (written.machine, len(written.measurements))


def edit(old: str, new: str):
    """A change of the text that finds what it changes."""

    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return change


BROKEN = {
    "cut short": (lambda text: text[: len(text) // 2], "cut short or edited"),
    "a time edited": (edit("[2048,256,0,2.65536", "[2048,256,0,1.65536"), "cut short or edited"),
    "a line left out": (edit("[2048,256,0,2.65536,0.01,20]\n", ""), "cut short or edited"),
    "a newer version": (edit('"version": 2', '"version": 3'), r"newer LoKA \(version 3, this one reads 2\)"),
    "no sha256": (edit('"sha256"', '"sha"'), "damaged in line 1: 'sha256'"),
    "the first line cut": (lambda text: text[:60], "damaged in line 1"),
    "a version that is none": (edit('"version": 2', '"version": []'), "damaged in line 1"),
    "a version that is infinite": (edit('"version": 2', '"version": Infinity'), "damaged in line 1: cannot convert"),
    "a version that never was": (edit('"version": 2', '"version": -1'), "damaged in line 1: version -1 never was"),
    "no UTF-8": (lambda text: text.replace("loka bench", "\udcff"), "damaged: no UTF-8 at byte"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_or_edited_text_is_an_error_and_stays_as_it_is(case, exported):
    change, says = BROKEN[case]
    exported.write_bytes(change(exported.read_text()).encode("utf-8", "surrogateescape"))
    before = exported.read_bytes()
    with pytest.raises(InputError, match=says) as caught:
        Measurements.open(exported, "h100")
    assert str(caught.value).startswith(f"{exported}: ")
    assert exported.read_bytes() == before


KIND = '{"work": "gemm", "kernel": "k", "dtype": "x", "recipe": "", "around": ""}\n'
SENSELESS = {
    "a measurement before any kind": "[64,64,64,1,0.1,20,null,null]",
    "a work that is none": '{"work": "sort", "kernel": "k", "dtype": "bfloat16", "recipe": "", "around": ""}',
    "a kind that lacks a field": '{"work": "gemm", "kernel": "k"}',
    "too few figures": KIND + "[64,64,64]",
    "no time": KIND + "[64,64,64,-1,0,1,null,null]",
    "words for numbers": KIND + '["a",4,4,1,0,1,0,0]',
    "no JSON": "[64,",
    "a number alone": "3",
}


@pytest.mark.parametrize("case", SENSELESS)
def test_lines_that_no_export_wrote_are_an_error(case, exported):
    lines = [exported.read_text().splitlines()[1], *SENSELESS[case].split("\n")]
    head = {"format": "loka.measurements", "version": 1, "command": "", "sha256": text_file.digest(lines)}
    exported.write_text("\n".join([json.dumps(head), *lines, ""]))
    with pytest.raises(InputError, match="damaged"):
        Measurements.open(exported, "h100")


def test_a_text_of_version_1_reads_the_same(exported):
    known = text_file.read_text(exported, "h100")
    head, *lines = exported.read_text().splitlines()
    lines = [f"{line[:-1]},null,null]" if line.startswith("[") and line.count(",") == 5 else line for line in lines]
    assert "[2048,256,0,2.65536,0.01,20,null,null]" in lines
    head = json.dumps({**json.loads(head), "version": 1, "sha256": text_file.digest(lines)})
    exported.write_text("\n".join([head, *lines, ""]))
    assert text_file.read_text(exported, "h100") == known


def test_a_text_of_another_device_is_none_of_the_target(exported):
    with pytest.raises(InputError, match="target h200: it has measurements of NVIDIA H100 80GB HBM3"):
        Measurements.open(exported, "h200")


def test_where_it_cannot_be_written_it_says_so(tmp_path):
    path = record(tmp_path / "m.sqlite", grid())
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match="taken: cannot be written: Is a directory"):
        export(path, tmp_path / "taken", "h100", COMMAND)
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "taken"]


def test_a_recording_is_never_replaced_by_its_text(tmp_path):
    path = record(tmp_path / "m.sqlite", grid())
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"m\.sqlite: a recording stands there, which the text would replace"):
        export(path, path, "h100", COMMAND)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_nor_is_a_pipe_or_a_device(tmp_path):
    path = record(tmp_path / "m.sqlite", grid())
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe: cannot be written: it is a device or a pipe"):
        export(path, tmp_path / "pipe", "h100", COMMAND)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_what_cannot_be_exported_is_said_as_it_is(exported, tmp_path):
    for source, says in (
        (exported, "a text already; name the file of"),
        (tmp_path / "nowhere", "is not there; make it with"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        with pytest.raises(InputError) as caught:
            export(source, tmp_path / "o.jsonl", "h100", COMMAND)
        assert str(caught.value).startswith(f"{source}: {says}")
    assert not (tmp_path / "o.jsonl").exists()


def test_a_target_without_a_set_has_none(monkeypatch, exported):
    monkeypatch.setattr(text_file, "DATA", exported.parent)
    assert Measurements.shipped("h200") is None
    found = Measurements.shipped("h100")
    assert (found.name, len(found)) == ("h100.jsonl of LoKA", 79)


def test_a_set_that_ships_damaged_says_that_it_came_with_loka(monkeypatch, exported):
    monkeypatch.setattr(text_file, "DATA", exported.parent)
    exported.write_text(exported.read_text()[:2000])
    with pytest.raises(InputError, match=r"h100\.jsonl: cut short or edited: .* exported; it came with LoKA: install"):
        Measurements.shipped("h100")
    exported.unlink()
    exported.mkdir()
    with pytest.raises(InputError, match="cannot be read: Is a directory; it came with LoKA: install"):
        Measurements.shipped("h100")


@pytest.mark.slow
def test_every_gpu_target_ships_a_set_of_its_own_device():
    assert sorted(path.name for path in text_file.DATA.glob("*")) == [f"{target}.jsonl" for target in GPU_TARGETS]
    for target in GPU_TARGETS:
        found = Measurements.shipped(target)
        assert found.machine.device == DEVICES[target].measured_on
        assert len(found) > 12_000
    assert Measurements.shipped("reference") is None
