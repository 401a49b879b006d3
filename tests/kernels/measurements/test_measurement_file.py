"""Files of measurements: what several writers leave, what a kill leaves, and which machine's times are used."""

from __future__ import annotations

import math
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from loka.errors import InputError
from loka.kernels.measurements.lookup import Measurements, Recording, Versions, export
from loka.kernels.measurements.parts import Part, PartKind, TimeSource
from loka.kernels.measurements.sqlite_file import APPLICATION_ID, SCHEMA
from tests.support.plan.measured_cases import HOPPER, LATER, edit, gemm, grid, measurement, passes, quantize, record
from tests.support.processes.measurement_writer import Writer

pytestmark = pytest.mark.slow


def kept(path: Path) -> set[int]:
    """The numbers of the parts that a file has."""
    found = Measurements.open(path, "h100")
    return {index for index in range(20_000) if (time := found.time(gemm(16 * (index + 1), 64, 64))) is not None
            and time.source is TimeSource.MEASURED and time.us == 1.0 + index}  # fmt: skip


def test_what_was_recorded_is_there_to_read_and_to_resume(tmp_path):
    path = record(tmp_path / "deep" / "m.sqlite", [*grid(), *passes()])
    assert sorted(tmp_path.rglob("*.*")) == [path], "at rest it is a single file"
    found = Measurements.open(path, "h100")
    assert len(found) == 64 + 12
    assert (found.name, found.machine, found.others) == ("m.sqlite", HOPPER, ())
    for each in (*grid(), *passes()):
        assert found.time(each.part).us == pytest.approx(each.us, rel=1e-5)
    with Recording(path, lambda kernel: HOPPER) as recording:
        assert recording.has(gemm(64, 64, 64))
        assert not recording.has(gemm(64, 64, 65))
        assert not recording.has(replace(gemm(64, 64, 64), dtype="float16"))
    with Recording(path, lambda kernel: LATER) as recording:
        assert not recording.has(gemm(64, 64, 64))


def test_the_last_measurement_of_a_part_counts(tmp_path):
    path = record(tmp_path / "m.sqlite", [measurement(gemm(64, 64, 64), us=9.0), measurement(gemm(64, 64, 64), us=7.0)])
    assert Measurements.open(path, "h100").time(gemm(64, 64, 64)).us == 7.0


def test_infinite_errors_and_reasons_come_back(tmp_path):
    wrong = replace(measurement(gemm(64, 64, 64), us=0.0, wrong="MERE inf", mere=math.inf), sqnr_db=-math.inf)
    right = replace(measurement(gemm(64, 64, 128), mere=0.0), sqnr_db=math.inf)
    found = Measurements.open(record(tmp_path / "m.sqlite", [wrong, right]), "h100")
    assert found.wrong_reason(gemm(64, 64, 64)) == "MERE inf"
    assert found.error(gemm(64, 64, 128)) == (0.0, math.inf)


def test_figures_that_make_no_sense_are_not_kept(tmp_path):
    with Recording(tmp_path / "m.sqlite", lambda kernel: HOPPER) as recording:
        with pytest.raises(InputError, match="no time of a kernel"):
            recording.add(measurement(gemm(64, 64, 64), us=math.nan))
        assert not recording.has(gemm(64, 64, 64))


def test_outside_of_its_with_statement_it_says_so(tmp_path):
    recording = Recording(tmp_path / "m.sqlite", lambda kernel: HOPPER)
    with pytest.raises(InputError, match="`with` statement"):
        recording.has(gemm(64, 64, 64))
    assert list(tmp_path.iterdir()) == []


def test_several_writers_lose_nothing(tmp_path):
    path = tmp_path / "m.sqlite"
    writers = [Writer(path, 100 * index, 60) for index in range(4)]
    assert [each.end() for each in writers] == [0] * 4
    assert kept(path) == {100 * index + step for index in range(4) for step in range(60)}
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_another_writer_begins_meanwhile_is_taken_as_it_was_at_one_moment(tmp_path, monkeypatch):
    path = tmp_path / "m.sqlite"
    empty = sqlite3.connect(path)
    empty.execute("PRAGMA journal_mode = WAL")
    begun, connect = [], sqlite3.connect

    def begin(statement: str) -> None:
        if "user_version" in statement and not begun:
            begun.append(statement)
            record(path, [measurement(gemm(64, 64, 64))])

    def traced(*place: object, **options: object) -> sqlite3.Connection:
        connection = connect(*place, **options)
        connection.set_trace_callback(begin)
        return connection

    monkeypatch.setattr(sqlite3, "connect", traced)
    record(path, [measurement(gemm(64, 64, 128))])
    empty.close()
    assert begun
    assert len(Measurements.open(path, "h100")) == 2


def test_a_kill_in_the_middle_loses_nothing_that_was_finished(tmp_path):
    path = tmp_path / "m.sqlite"
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


@pytest.mark.parametrize("milliseconds", [0, 1, 2, 4, 8, 16, 32])
def test_a_kill_at_the_start_leaves_a_file_that_can_be_gone_on_with(tmp_path, milliseconds):
    path = tmp_path / "m.sqlite"
    victim = Writer(path, 0, 10_000)
    while not path.exists() and victim.running:
        time.sleep(0.0002)
    time.sleep(milliseconds / 1000)
    victim.kill()
    assert victim.end() == -signal.SIGKILL
    record(path, [measurement(quantize(512, 64))])
    assert Measurements.open(path, "h100").time(quantize(512, 64)).source is TimeSource.MEASURED


def interrupted(path: Path, versions: Versions) -> None:
    """A recording that is interrupted after one product."""

    def measure() -> None:
        with Recording(path, lambda kernel: versions) as recording:
            recording.add(measurement(gemm(64, 64, 64)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure()


def test_a_writer_that_fails_leaves_what_it_finished(tmp_path):
    path = tmp_path / "m.sqlite"
    interrupted(path, HOPPER)
    assert len(Measurements.open(path, "h100")) == 1


HALF_DONE = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size = 1")  # so that pages are written before the transaction is whole
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE measurements SET us = 999.0")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_transaction_that_a_kill_left_half_done_is_undone(tmp_path):
    path = record(tmp_path / "m.sqlite", [*grid(), *passes(rows=range(512, 16384, 256))])
    subprocess.run([sys.executable, "-c", HALF_DONE, str(path)], check=False)
    assert Path(f"{path}-journal").exists(), "the kill came too late"
    found = Measurements.open(path, "h100")
    assert {found.time(each.part).us for each in grid()}.isdisjoint({999.0})
    assert list(tmp_path.iterdir()) == [path]
    record(path, [measurement(gemm(64, 64, 65))])


def test_reading_goes_on_while_others_write(tmp_path):
    path = tmp_path / "m.sqlite"
    with Recording(path, lambda kernel: HOPPER) as recording:
        recording.add(measurement(gemm(64, 64, 64)))
        assert len(Measurements.open(path, "h100")) == 1
        recording.add(measurement(gemm(64, 64, 128)))
        assert len(Measurements.open(path, "h100")) == 2
    assert list(tmp_path.iterdir()) == [path]


def stamped(path: Path, versions: Versions, date: str) -> None:
    """Set back or forward when a machine's measurements were made."""
    edit(
        path,
        "UPDATE measurements SET recorded = ? WHERE versions IN (SELECT id FROM versions WHERE driver = ?)",
        (date, versions.driver),
    )


def test_the_machine_that_was_measured_last_counts_alone_and_the_other_is_named(tmp_path):
    path = record(tmp_path / "m.sqlite", [measurement(gemm(64, 64, 64), us=9.0), measurement(gemm(64, 64, 128))])
    record(path, [measurement(gemm(64, 64, 64), us=7.0)], LATER)
    stamped(path, HOPPER, "2026-01-05T00:00:00Z")
    found = Measurements.open(path, "h100")
    assert found.machine == LATER
    assert found.time(gemm(64, 64, 64)).us == 7.0
    assert found.time(gemm(64, 64, 128)).source is TimeSource.ESTIMATED, "not the other machine's"
    (line,) = found.others
    assert line.startswith("2 measurements on NVIDIA H100 80GB HBM3, driver 575.57.08, CUDA 13.0, ")
    assert line.endswith("the last on 2026-01-05: not used")
    stamped(path, LATER, "2026-01-04T00:00:00Z")
    assert Measurements.open(path, "h100").machine == HOPPER


def test_a_recording_that_did_not_end_does_not_take_the_place_of_a_complete_one(tmp_path):
    path = record(tmp_path / "m.sqlite", [measurement(gemm(64, 64, 64)), measurement(gemm(64, 64, 128))])
    stamped(path, HOPPER, "2026-01-05T00:00:00Z")
    interrupted(path, LATER)
    assert Measurements.open(path, "h100").machine == HOPPER
    record(path, [measurement(gemm(64, 64, 128))], LATER)
    assert Measurements.open(path, "h100").machine == LATER


def test_nor_does_one_that_stopped_early(tmp_path):
    path = record(tmp_path / "m.sqlite", [measurement(gemm(64, 64, 64)), measurement(gemm(64, 64, 128))])
    with Recording(path, lambda kernel: LATER) as recording:
        recording.add(measurement(gemm(64, 64, 64)))
        recording.stopped_early()
    assert Measurements.open(path, "h100").machine == HOPPER
    record(path, [], LATER)
    assert Measurements.open(path, "h100").machine == HOPPER, "that recording asked for nothing"
    with Recording(path, lambda kernel: LATER) as recording:
        assert recording.has(gemm(64, 64, 64))
    assert Measurements.open(path, "h100").machine == LATER


def test_nor_does_one_that_lacks_a_kind_of_work(tmp_path):
    path = record(tmp_path / "m.sqlite", [measurement(gemm(64, 64, 64)), measurement(quantize(64, 64))])
    stamped(path, HOPPER, "2026-01-05T00:00:00Z")
    record(path, [measurement(gemm(64, 64, each)) for each in (64, 128, 256)], LATER)
    assert Measurements.open(path, "h100").machine == HOPPER
    record(path, [measurement(quantize(64, 64))], LATER)
    assert Measurements.open(path, "h100").machine == LATER


def test_a_recording_without_interactions_is_complete(tmp_path):
    mix = Part(PartKind.FM_INTERACTION, "rendered", 4096, 128, around="64 embeddings, rank 32")
    path = record(tmp_path / "m.sqlite", [measurement(gemm(64, 64, 64)), measurement(mix)])
    stamped(path, HOPPER, "2026-01-05T00:00:00Z")
    record(path, [measurement(gemm(64, 64, 64))], LATER)
    assert Measurements.open(path, "h100").machine == LATER


def test_a_kernel_counts_with_one_version_of_its_library(tmp_path):
    path = tmp_path / "m.sqlite"
    for library, us in (("1.5.0", 9.0), ("1.6.0", 7.0)):
        versions = {"fbgemm.rowwise": replace(HOPPER, library=library)}
        with Recording(path, lambda kernel, versions=versions: versions.get(kernel, HOPPER)) as recording:
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


def test_another_device_is_no_measurement_of_the_target(tmp_path):
    path = record(tmp_path / "m.sqlite", [measurement(gemm(64, 64, 64))], replace(HOPPER, device="NVIDIA H200"))
    with pytest.raises(InputError, match=r"nothing was measured on a device of target h100: .* of NVIDIA H200"):
        Measurements.open(path, "h100")
    assert Measurements.open(path, "h200").machine.device == "NVIDIA H200"


def test_a_recording_without_any_measurement_says_so_when_read(tmp_path):
    path = record(tmp_path / "m.sqlite", [])
    with pytest.raises(InputError, match="it has no measurements yet"):
        Measurements.open(path, "h100")


def foreign(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE measurements (id INTEGER)")
    connection.commit()
    connection.close()


def newer(path: Path) -> None:
    record(path, grid())
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    connection.close()


def older(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.close()


def cut(path: Path) -> None:
    record(path, grid())
    path.write_bytes(path.read_bytes()[:-5000])


def scribbled(path: Path) -> None:
    record(path, grid())
    data = bytearray(path.read_bytes())
    data[3 * 4096 : 6 * 4096] = bytes(range(256)) * 48
    path.write_bytes(data)


def nonsense(path: Path) -> None:
    record(path, grid())
    edit(path, "UPDATE measurements SET us = -1.0 WHERE contraction = 64")


def unknown_work(path: Path) -> None:
    record(path, grid())
    edit(path, "UPDATE measurements SET work = 'sort' WHERE contraction = 64")


def without_a_table(path: Path) -> None:
    record(path, grid())
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE measurements")
    connection.commit()
    connection.close()


def in_wal_mode(path: Path) -> None:
    """Of a newer LoKA, and closed with a log that is empty: reading it the usual way would make one anew."""
    newer(path)
    data = bytearray(path.read_bytes())
    data[18:20] = b"\2\2"
    path.write_bytes(data)


BROKEN = {
    "a write-ahead log and a newer schema": (in_wal_mode, "newer LoKA"),
    "random bytes": (lambda path: path.write_bytes(bytes(range(256)) * 40), "no file of measurements"),
    "random bytes behind the right start": (
        lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 40),
        "damaged",
    ),
    "the start of a header alone": (lambda path: path.write_bytes(b"SQLite"), "no file of measurements"),
    "a header alone": (lambda path: path.write_bytes(b"SQLite format 3\0"), "damaged"),
    "a folder": (lambda path: path.mkdir(), "s a directory; check the path"),
    "another program's database": (foreign, "an SQLite file, but none of"),
    "a newer schema": (newer, rf"newer LoKA \(schema {SCHEMA + 1}, this one reads {SCHEMA}\)"),
    "a schema that never was": (older, "schema 0 never was"),
    "cut short": (cut, "damaged"),
    "overwritten in the middle": (scribbled, "damaged"),
    "a negative time": (nonsense, "damaged: measurement of"),
    "a work that is none": (unknown_work, "damaged: 'sort'"),
    "a table that is not there": (without_a_table, "damaged: no such table: measurements; take it from"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_read_is_an_error_and_stays_as_it_is(case, tmp_path):
    path = tmp_path / "m.sqlite"
    make, says = BROKEN[case]
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(InputError, match=says) as caught:
        Measurements.open(path, "h100")
    assert str(caught.value).startswith(f"{path}: ")
    assert (path.read_bytes() if path.is_file() else None) == before
    assert list(tmp_path.iterdir()) == [path]


UNWRITABLE = sorted(
    set(BROKEN) - {"a negative time", "a work that is none", "a table that is not there"}
)  # found on reading


@pytest.mark.parametrize("case", UNWRITABLE)
def test_nor_is_it_written_to(case, tmp_path):
    path = tmp_path / "m.sqlite"
    make, says = BROKEN[case]
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(InputError, match=says), Recording(path, lambda kernel: HOPPER):
        pytest.fail("it opened")
    assert (path.read_bytes() if path.is_file() else None) == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_text_that_no_memory_holds_is_refused_at_once(tmp_path):
    path = tmp_path / "m.jsonl"
    export(record(tmp_path / "m.sqlite", grid()), path, "h100", "made up")
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match=r"m\.jsonl: cannot be read: it has 1099511627776 bytes, more"):
        Measurements.open(path, "h100")


def test_an_empty_file_is_none_to_read_and_one_to_write(tmp_path):
    path = tmp_path / "m.sqlite"
    path.touch()
    with pytest.raises(InputError, match=r"m\.sqlite: empty; record measurements"):
        Measurements.open(path, "h100")
    assert path.read_bytes() == b""
    record(path, grid())
    assert len(Measurements.open(path, "h100")) == 64


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match="is not there; make it with `loka bench kernels --record"):
        Measurements.open(tmp_path / "m.sqlite", "h100")
    assert list(tmp_path.iterdir()) == []


AS_NOBODY = """
import os, sys
from loka.errors import InputError
from loka.kernels.measurements.lookup import Measurements, Recording
if os.getuid() == 0:  # who may read everything
    os.setuid(65534)
for attempt in (lambda: Measurements.open(sys.argv[1], "h100"), lambda: Recording(sys.argv[1], None).__enter__()):
    try:
        attempt()
    except InputError as error:
        print(error)
"""


def test_without_permission_it_says_so():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = record(Path(folder) / "m.sqlite", grid())
        path.chmod(0)
        ran = subprocess.run([sys.executable, "-c", AS_NOBODY, str(path)], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [f"{path}: cannot be read: Permission denied; check the path"] * 2
