"""Recordings: what several writers leave, what a kill leaves, and which machine's times are used."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from loka.errors import InputError
from loka.kernels.measurements import recording
from loka.kernels.measurements.lookup import Measurements, Recording, Versions
from loka.kernels.measurements.parts import Part, PartKind, TimeSource
from tests.support.plan.measured_cases import HOPPER, LATER, edit, gemm, grid, measurement, passes, quantize, record
from tests.support.processes.measurement_writer import Writer

pytestmark = pytest.mark.slow


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.jsonl"


def kept(path: Path) -> set[int]:
    """The numbers of the parts that a file has."""
    found = Measurements.open(path, "h100")
    return {index for index in range(20_000) if (time := found.time(gemm(16 * (index + 1), 64, 64))) is not None
            and time.source is TimeSource.MEASURED and time.us == 1.0 + index}  # fmt: skip


def test_what_was_recorded_is_there_to_read_and_to_resume(tmp_path):
    path = record(tmp_path / "deep" / "m.jsonl", [*grid(), *passes()])
    assert sorted(tmp_path.rglob("*.*")) == [path]
    found = Measurements.open(path, "h100")
    assert len(found) == 64 + 12
    assert (found.name, found.machine, found.others) == ("m.jsonl", HOPPER, ())
    for each in (*grid(), *passes()):
        assert found.time(each.part).us == pytest.approx(each.us, rel=1e-5)
    before = path.read_bytes()
    with Recording(path, HOPPER) as recording:
        assert recording.has(gemm(64, 64, 64))
        assert not recording.has(gemm(64, 64, 65))
        assert not recording.has(replace(gemm(64, 64, 64), dtype="float16"))
        recording.stopped_early()
    assert path.read_bytes() == before, "it recorded nothing"
    for machine, libraries in ((LATER, {}), (HOPPER, {"torch.scaled_mm": "2"})):
        with Recording(path, machine, libraries) as recording:
            assert not recording.has(gemm(64, 64, 64))


def test_a_measurement_is_a_line(path):
    record(path, [measurement(gemm(64, 64, 64), us=9.0), measurement(gemm(64, 64, 128), us=7.0, mere=0.0)])
    head, machine, kind, *rows, end = map(json.loads, path.read_text().splitlines())
    assert head == {"format": "loka.measurements", "version": 2, "sha256": None}
    assert (machine["machine"]["device"], kind["work"], kind["kernel"]) == (HOPPER.device, "gemm", "torch.scaled_mm")
    assert rows == [[64, 64, 64, 9.0, 0.01, 20, 0.026, 31.5], [64, 64, 128, 7.0, 0.01, 20, 0.0, 31.5]]
    assert end["finished"] >= machine["date"]


def test_the_last_measurement_of_a_part_counts(path):
    record(path, [measurement(gemm(64, 64, 64), us=9.0), measurement(gemm(64, 64, 64), us=7.0)])
    assert Measurements.open(path, "h100").time(gemm(64, 64, 64)).us == 7.0
    record(path, [measurement(gemm(64, 64, 64), us=5.0)])
    assert Measurements.open(path, "h100").time(gemm(64, 64, 64)).us == 5.0


def test_infinite_errors_and_reasons_come_back(path):
    wrong = replace(measurement(gemm(64, 64, 64), us=0.0, wrong="MERE inf", mere=math.inf), sqnr_db=-math.inf)
    right = replace(measurement(gemm(64, 64, 128), mere=0.0), sqnr_db=math.inf)
    found = Measurements.open(record(path, [wrong, right]), "h100")
    assert found.wrong_reason(gemm(64, 64, 64)) == "MERE inf"
    assert found.error(gemm(64, 64, 128)) == (0.0, math.inf)


def test_figures_that_make_no_sense_are_not_kept(path):
    with Recording(path, HOPPER) as recording:
        with pytest.raises(InputError, match="no time of a kernel"):
            recording.add(measurement(gemm(64, 64, 64), us=math.nan))
        assert not recording.has(gemm(64, 64, 64))


def test_outside_of_its_with_statement_it_says_so(tmp_path):
    recording = Recording(tmp_path / "m.jsonl", HOPPER)
    with pytest.raises(InputError, match="`with` statement"):
        recording.has(gemm(64, 64, 64))
    assert list(tmp_path.iterdir()) == []


def test_several_writers_lose_nothing(path):
    writers = [Writer(path, 100 * index, 60) for index in range(4)]
    assert [each.end() for each in writers] == [0] * 4
    assert kept(path) == {100 * index + step for index in range(4) for step in range(60)}
    assert list(path.parent.iterdir()) == [path]


def test_each_writer_sees_what_another_has_added(path):
    with Recording(path, HOPPER) as first, Recording(path, HOPPER) as second, Recording(path, LATER) as other:
        for recording, contraction in ((first, 64), (other, 64), (second, 128), (first, 256)):
            recording.add(measurement(gemm(64, 64, contraction)))
        first.add(measurement(quantize(64, 64)))
        second.add(measurement(gemm(64, 64, 512)))
        assert first.has(gemm(64, 64, 512))
        assert second.has(quantize(64, 64))
        assert not other.has(gemm(64, 64, 128))
        assert len(Measurements.open(path, "h100")) == 5, "reading goes on meanwhile"
    found = Measurements.open(path, "h100")
    assert len(found) == 5
    assert found.others[0].startswith("1 measurement on")


def test_a_kill_in_the_middle_loses_nothing_that_was_finished(path):
    victim, witness = Writer(path, 0, 10_000), Writer(path, 10_000, 150)
    finished = victim.finished(40)
    assert len(finished) == 40
    victim.kill()
    told = {*finished, *victim.finished()}
    assert victim.end() == -signal.SIGKILL
    assert witness.end() == 0
    have = kept(path)
    assert told <= have
    assert {index for index in have if index >= 10_000} == set(range(10_000, 10_150))
    assert Writer(path, 0, 200).end() == 0
    assert set(range(200)) <= kept(path)


@pytest.mark.parametrize("milliseconds", [0, 2, 16])
def test_a_kill_at_the_start_leaves_a_file_that_can_be_gone_on_with(path, milliseconds):
    victim = Writer(path, 0, 10_000)
    while not path.exists() and victim.running:
        time.sleep(0.0002)
    time.sleep(milliseconds / 1000)
    victim.kill()
    assert victim.end() == -signal.SIGKILL
    record(path, [measurement(quantize(512, 64))])
    assert Measurements.open(path, "h100").time(quantize(512, 64)).source is TimeSource.MEASURED


@pytest.mark.parametrize("left", [b"[64,64,128,1.0,0.01", b'{"machine": {"device', b"[64,64,\xff"])
def test_a_line_that_a_kill_left_half_written_is_not_read_and_is_cut(left, path):
    record(path, [measurement(gemm(64, 64, 64))])
    path.write_bytes(path.read_bytes() + left)
    assert len(Measurements.open(path, "h100")) == 1
    record(path, [measurement(gemm(64, 64, 128))])
    assert all(map(json.loads, path.read_text().splitlines()))
    assert len(Measurements.open(path, "h100")) == 2


def interrupted(path: Path, machine: Versions) -> None:
    """A recording that is interrupted after one product."""

    def measure() -> None:
        with Recording(path, machine) as recording:
            recording.add(measurement(gemm(64, 64, 64)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure()


def test_a_writer_that_fails_leaves_what_it_finished(path):
    interrupted(path, HOPPER)
    assert len(Measurements.open(path, "h100")) == 1
    edit_without_checksums(path, '"NVIDIA H100', '"NVIDIA H1OO')
    with pytest.raises(InputError, match="not those that were recorded"):
        Measurements.open(path, "h100")


def stamped(path: Path, machine: Versions, date: str) -> None:
    """Set back or forward when a machine's measurements were made."""

    def change(row):
        if isinstance(row, dict) and row.get("machine", {}).get("driver") == machine.driver:
            return {**row, "date": date}
        return row

    edit(path, change)


@pytest.mark.parametrize("machines", [(LATER, HOPPER), (HOPPER, LATER)])
def test_of_two_machines_in_the_same_moment_the_later_one_in_the_file_is_taken(machines, path, monkeypatch):
    monkeypatch.setattr(recording, "_now", lambda: "2026-01-04T00:00:00.000Z")
    for machine in machines:
        record(path, [measurement(gemm(64, 64, 64))], machine)
    assert Measurements.open(path, "h100").machine == machines[1]


def test_the_machine_that_was_measured_last_counts_alone_and_the_other_is_named(path):
    record(path, [measurement(gemm(64, 64, 64), us=9.0), measurement(gemm(64, 64, 128))])
    record(path, [measurement(gemm(64, 64, 64), us=7.0)], LATER)
    stamped(path, HOPPER, "2026-01-05T00:00:00Z")
    found = Measurements.open(path, "h100")
    assert found.machine == LATER
    assert found.time(gemm(64, 64, 64)).us == 7.0
    assert found.time(gemm(64, 64, 128)).source is TimeSource.EXTRAPOLATED, "not the other machine's"
    (line,) = found.others
    assert line.startswith("2 measurements on NVIDIA H100 80GB HBM3, driver 575.57.08, CUDA 13.0, ")
    assert line.endswith("the last on 2026-01-05: not used")
    stamped(path, LATER, "2026-01-04T00:00:00Z")
    assert Measurements.open(path, "h100").machine == HOPPER


def test_a_recording_that_did_not_end_does_not_take_the_place_of_a_complete_one(path):
    record(path, [measurement(gemm(64, 64, 64)), measurement(gemm(64, 64, 128))])
    stamped(path, HOPPER, "2026-01-05T00:00:00Z")
    interrupted(path, LATER)
    assert Measurements.open(path, "h100").machine == HOPPER
    record(path, [measurement(gemm(64, 64, 128))], LATER)
    assert Measurements.open(path, "h100").machine == LATER


def test_nor_does_one_that_stopped_early(path):
    record(path, [measurement(gemm(64, 64, 64)), measurement(gemm(64, 64, 128))])
    with Recording(path, LATER) as recording:
        recording.add(measurement(gemm(64, 64, 64)))
        recording.stopped_early()
    assert Measurements.open(path, "h100").machine == HOPPER
    record(path, [], LATER)
    assert Measurements.open(path, "h100").machine == HOPPER, "that recording asked for nothing"
    with Recording(path, LATER) as recording:
        assert recording.has(gemm(64, 64, 64))
    assert Measurements.open(path, "h100").machine == LATER


def test_nor_does_one_that_lacks_a_kind_of_work(path):
    record(path, [measurement(gemm(64, 64, 64)), measurement(quantize(64, 64))])
    stamped(path, HOPPER, "2026-01-05T00:00:00Z")
    record(path, [measurement(gemm(64, 64, each)) for each in (64, 128, 256)], LATER)
    assert Measurements.open(path, "h100").machine == HOPPER
    record(path, [measurement(quantize(64, 64))], LATER)
    assert Measurements.open(path, "h100").machine == LATER


def test_a_recording_without_interactions_is_complete(path):
    mix = Part(PartKind.FM_INTERACTION, "rendered", 4096, 128, around="64 embeddings, rank 32")
    record(path, [measurement(gemm(64, 64, 64)), measurement(mix)])
    stamped(path, HOPPER, "2026-01-05T00:00:00Z")
    record(path, [measurement(gemm(64, 64, 64))], LATER)
    assert Measurements.open(path, "h100").machine == LATER


def test_a_kernel_counts_with_one_version_of_its_library(path):
    for library, us in (("1.5.0", 9.0), ("1.6.0", 7.0)):
        with Recording(path, HOPPER, {"fbgemm.rowwise": library}) as recording:
            recording.add(measurement(gemm(64, 64, 64)))
            recording.add(measurement(gemm(64, 64, 64, "fbgemm.rowwise"), us=us))
    found = Measurements.open(path, "h100")
    assert found.machine == HOPPER
    assert found.time(gemm(64, 64, 64, "fbgemm.rowwise")).us == 7.0
    assert found.libraries == {"fbgemm.rowwise": "1.6.0"}
    assert found.others == ("1 measurement of fbgemm.rowwise 1.5.0: not used",)
    assert found.stale(HOPPER, {"fbgemm.rowwise": "1.7.0"}) == (
        "fbgemm.rowwise: measured with 1.6.0, this machine has 1.7.0",
    )


def test_another_device_is_no_measurement_of_the_target(path):
    record(path, [measurement(gemm(64, 64, 64))], replace(HOPPER, device="NVIDIA H200"))
    with pytest.raises(InputError, match=r"nothing was measured on a device of target h100: .* of NVIDIA H200"):
        Measurements.open(path, "h100")
    assert Measurements.open(path, "h200").machine.device == "NVIDIA H200"


def test_a_recording_without_any_measurement_says_so_when_read(path):
    with pytest.raises(InputError, match="it has no measurements yet"):
        Measurements.open(record(path, []), "h100")


def edit_without_checksums(path: Path, old: str, new: str) -> None:
    """Change a text in a file that has it."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def changed(old: str, new: str):
    return lambda path: edit_without_checksums(record(path, grid()), old, new)


ROW = "[64,64,64,2.50075,0.01,20,0.026,31.5]"
BROKEN = {
    "random bytes": (lambda path: path.write_bytes(bytes(range(256)) * 40), "no file of measurements"),
    "a recording of LoKA 0.1": (
        lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(range(256))),
        r"SQLite, as LoKA 0\.1 recorded; write it with LoKA 0\.1 by `loka bench kernels .*m\.jsonl --export FILE`",
    ),
    "a folder": (lambda path: path.mkdir(), "s a directory; check the path"),
    "other JSON": (lambda path: path.write_text('{"format": "loka.plan"}\n'), "no file of measurements"),
    "a newer version": (changed('"version": 2', '"version": 3'), r"newer LoKA \(version 3, this one reads 2\)"),
    "an older version": (changed('"version": 2', '"version": 1'), r"older LoKA \(version 1.*with LoKA 0\.1 by `loka"),
    "a version that is none": (changed('"version": 2', '"version": []'), "damaged in line 1"),
    "a version that is infinite": (changed('"version": 2', '"version": Infinity'), "damaged in line 1: cannot convert"),
    "no sha256": (changed('"sha256"', '"sha"'), "damaged in line 1: 'sha256'"),
    "a sha256 of another type": (changed("null", "1"), "damaged in line 1: 1 is no sha256"),
    "a time edited": (changed("[64,64,64,2.5", "[64,64,64,1.5"), "damaged in line 68: the lines before it are not"),
    "a lost line": (changed(ROW + "\n", ""), "damaged in line 67: the lines before it are not"),
    "another driver": (changed("575.57.08", "580.65.07"), "damaged in line 68: the lines before it are not"),
    "a lost machine": (lambda path: edit(record(path, grid()), lambda row: ("machine" not in row and row) or None),
                       "damaged in line 2: a kind of part stands before its machine"),
    "no UTF-8": (lambda path: path.write_bytes(record(path, grid()).read_bytes().replace(b"gemm", b"ge\xffm")),
                 "damaged: no UTF-8 at byte"),
    "an exported time that is negative": (lambda path: edit(record(path, grid()), lambda row: [*row[:3], -1.0, *row[4:]]
                                          if isinstance(row, list) else row), "damaged in line 4: measurement of"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_read_is_an_error_and_is_not_written_to_either(case, path):
    make, says = BROKEN[case]
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(InputError, match=says) as caught:
        Measurements.open(path, "h100")
    assert str(caught.value).startswith(f"{path}: ")
    with pytest.raises(InputError, match=says), Recording(path, HOPPER):
        pytest.fail("it opened")
    assert (path.read_bytes() if path.is_file() else None) == before
    assert list(path.parent.iterdir()) == [path]


KIND = '{"work": "gemm", "kernel": "k", "dtype": "bfloat16", "recipe": "", "around": ""}\n'
MIX = '{"work": "mix", "kernel": "k", "dtype": "bfloat16", "recipe": "", "around": "%s"}\n'
SENSELESS = {
    "a measurement before any kind": ("[64,64,64,1,0.1,20]", "stands before its machine or its kind"),
    "no work": (KIND.replace("gemm", "sort"), "'sort' is not a valid PartKind"),
    "a kind that lacks a field": ('{"work": "gemm", "kernel": "k"}', "missing 3 required"),
    "a kind of numbers": (KIND.replace('"k"', "7"), "'kernel' is 7, which is no text"),
    "too few figures": (KIND + "[64,64,64]", "not enough values"),
    "words for numbers": (KIND + '["a",4,4,1,0,1,0,0]', "is no row of measurements"),
    "half a row": (KIND + "[0.5,4,4,1,0,1,0,0]", "is no row of measurements"),
    "a negative time": (KIND + "[64,64,64,-1,0,1]", "-1 us is no time of a kernel"),
    "an infinite time": (KIND + "[64,64,64,9e999,0,1]", "inf us is no time of a kernel"),
    "an infinite spread": (KIND + "[64,64,64,1,9e999,1]", "inf is no spread"),
    "negative runs": (KIND + "[64,64,64,1,0,-1]", "-1 no number of runs"),
    "a negative MERE": (KIND + "[64,64,64,1,0,1,-0.5,1]", "-0.5 is no MERE"),
    "a huge size": (KIND + "[64,64,9223372036854775807,1,0,1]", "no matrix has these sizes"),
    "an interaction of no form": (MIX % "twice" + "[64,64,0,1,0,1]", "no mix has the form 'twice'"),
    "one of negative size": (MIX % "-5 embeddings, rank 2" + "[64,64,0,1,0,1]", "no matrix has these sizes"),
    "a time of next to nothing": (KIND + "[64,64,64,5e-324,0,1]", "5e-324 us is no time of a kernel"),
    "a size of 400 digits": (KIND + f"[1{'0' * 400},64,64,1,0,1]", "no matrix has these sizes"),
    "an error of 400 digits": (KIND + f"[64,64,64,1,0,1,0.1,1{'0' * 400}]", "too large to convert"),
    "an error of thousands of letters": (KIND + f'[64,64,64,1,0,1,"{"x" * 5000}",1]', "is no figure"),
    "no device": ('{"machine": {"device": null}}', "'date'"),
    "an array of arrays": ("[" * 3000 + "]" * 3000, "is no row of measurements|recursion|stands before"),
    "no JSON": ("[64,", "Expecting value"),
    "a number alone": ("3", "not iterable"),
}


@pytest.mark.parametrize("case", SENSELESS)
def test_lines_that_no_loka_wrote_are_an_error(case, path):
    lines, says = SENSELESS[case]
    head, machine, *_ = record(path, grid()).read_text().splitlines()
    path.write_text("\n".join([head, machine, lines.rstrip("\n"), ""]))
    with pytest.raises(InputError, match=f"damaged in line [34]: .*{says}") as caught:
        Measurements.open(path, "h100")
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 2000


def test_an_empty_file_is_none_to_read_and_one_to_write(path):
    for start in ("", '{"format": "loka.mea'):
        path.write_text(start)
        with pytest.raises(InputError, match=r"m\.jsonl: empty; record measurements"):
            Measurements.open(path, "h100")
        assert path.read_text() == start
        record(path, grid())
        assert len(Measurements.open(path, "h100")) == 64


def test_a_file_that_is_not_there_is_named(path):
    with pytest.raises(InputError, match="is not there; make it with `loka bench kernels --record"):
        Measurements.open(path, "h100")
    assert list(path.parent.iterdir()) == []


def test_a_file_that_no_memory_holds_is_refused_at_once(path):
    with record(path, grid()).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match=r"m\.jsonl: cannot be read: it has 1099511627776 bytes, more"):
        Measurements.open(path, "h100")


AS_NOBODY = """
import os, sys
from loka.errors import InputError
from loka.kernels.measurements.lookup import Measurements, Recording
from tests.support.plan.measured_cases import HOPPER
if os.getuid() == 0:  # who may read everything
    os.setuid(65534)
for attempt in (lambda: Measurements.open(sys.argv[1], "h100"), lambda: Recording(sys.argv[1], HOPPER).__enter__()):
    try:
        attempt()
    except InputError as error:
        print(error)
"""


def test_without_permission_it_says_so():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = record(Path(folder) / "m.jsonl", grid())
        path.chmod(0)
        ran = subprocess.run([sys.executable, "-c", AS_NOBODY, str(path)], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [f"{path}: cannot be read: Permission denied; check the path"] * 2
