"""Recordings whose values are not those that were recorded: refused, and older ones say that they cannot tell."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from loka.errors import InputError, UncheckedWarning
from loka.kernels.measurements.lookup import Measurements, Recording, export
from loka.kernels.measurements.row_digests import fold_all
from loka.kernels.measurements.sqlite_file import SCHEMA
from tests.support.flips import flipped
from tests.support.plan.measured_cases import HOPPER, LATER, as_schema_1, edit, gemm, grid, measurement, passes, record


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Of two machines, one of them with a kernel's own library."""
    path = record(tmp_path / "m.sqlite", [*grid((64, 256)), *passes((64, 256))])
    return record(path, grid((64, 256), "fbgemm.rowwise"), replace(LATER, library="1.5.0"))


def contents(path: Path) -> list[object]:
    """All that reading gives, in plain values."""
    found = Measurements.open(path, "h100")
    return [found.machine, found.libraries, found.others, sorted(map(repr, found.measured))]


@pytest.mark.slow
def test_every_flipped_bit_is_refused_or_changes_nothing(recording, tmp_path):
    data, known = recording.read_bytes(), contents(recording)
    bad = tmp_path / "bad.sqlite"
    refused = []
    for changed in flipped(data):
        bad.write_bytes(changed)
        try:
            found = contents(bad)
        except InputError as error:
            refused.append(str(error))
        else:
            assert found == known
    assert refused
    assert all(each.startswith(f"{bad}: ") for each in refused)


def change(path: Path, statement: str) -> None:
    """By SQL alone."""
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()


CHANGES = {
    "a time": "UPDATE measurements SET us = us * 2 WHERE work = 'quantize'",
    "an error": "UPDATE measurements SET mere = 0.001 WHERE columns = 64 AND contraction = 64",
    "a date": "UPDATE measurements SET recorded = '2030-01-01T00:00:00.000Z' WHERE columns = 64",
    "a lost row": "DELETE FROM measurements WHERE recorded = (SELECT min(recorded) FROM measurements)",
    "all rows lost": "DELETE FROM measurements",
    "a row of another machine": "UPDATE measurements SET versions = 3 - versions WHERE work = 'quantize'",
    "a driver": "UPDATE versions SET driver = '580.65.07' WHERE id = 2",
    "an end": "UPDATE versions SET finished = NULL WHERE id = 2",
    "a digest": "UPDATE versions SET digest = '' WHERE id = 2",
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_value_that_was_not_recorded_so_is_damage(case, recording):
    change(recording, CHANGES[case])
    with pytest.raises(InputError, match=r"m\.sqlite: damaged: what was measured on NVIDIA H100 .* is not what"):
        Measurements.open(recording, "h100")
    before = recording.read_bytes()
    with pytest.raises(InputError, match="damaged: what was measured"), Recording(recording, lambda kernel: HOPPER):
        pytest.fail("it opened")
    assert recording.read_bytes() == before


def test_measurements_of_a_lost_machine_are_damage(recording):
    change(recording, "DELETE FROM versions WHERE id = 2")
    with pytest.raises(InputError, match="damaged: versions 2, which measurements are of, are not there; take it from"):
        Measurements.open(recording, "h100")


def test_what_replaces_a_measurement_and_what_is_added_is_counted(recording):
    record(recording, [measurement(gemm(64, 64, 64), us=5.0), measurement(gemm(64, 64, 65))])
    found = Measurements.open(recording, "h100")
    assert found.time(gemm(64, 64, 64)).us == 5.0
    assert found.time(gemm(64, 64, 65)) is not None


def test_a_recording_of_before_is_read_with_a_warning(recording, recwarn):
    known = contents(recording)
    assert list(recwarn) == []
    as_schema_1(recording)
    with pytest.warns(UncheckedWarning, match=r"m\.sqlite: recorded by an earlier LoKA, without checksums"):
        assert contents(recording) == known


def test_and_gets_its_checksums_with_the_next_measurement(recording, recwarn):
    as_schema_1(recording)
    record(recording, [measurement(gemm(64, 64, 65))])
    known = contents(recording)
    assert list(recwarn) == []
    connection = sqlite3.connect(recording)
    assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA,)
    digests = connection.execute("SELECT digest FROM versions").fetchall()
    fold_all(connection)
    assert connection.execute("SELECT digest FROM versions").fetchall() == digests
    connection.close()
    assert contents(recording) == known
    change(recording, CHANGES["a time"])
    with pytest.raises(InputError, match="damaged"):
        Measurements.open(recording, "h100")


LOOSE = "UPDATE sqlite_master SET sql = replace(sql, 'STRICT, WITHOUT ROWID', 'WITHOUT ROWID')"


def loosened(path: Path, statement: str) -> None:
    """A change that the types of the columns forbid, in a file of before there were digests."""
    as_schema_1(path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute(LOOSE)
    connection.commit()
    connection.close()
    change(path, statement)


ABSURD = {
    "text where a number is": ("us = 'fast'", "row 1 of measurements: its us is 'fast', which is no number"),
    "a number where text is": ("kernel = x'00ff'", r"its kernel is b'\\x00\\xff', which is no text"),
    "a date that is none": ("recorded = x'00'", r"its recorded is b'\\x00', which is no text"),
    "half a row": ('"rows" = 0.5', "its rows is 0.5, which is no whole number"),
    "a huge integer": ("contraction = 9223372036854775807", "no matrix has these sizes"),
    "a negative time": ("us = -1.0", "-1.0 us is no time of a kernel"),
    "an infinite time": ("us = 9e999", "inf us is no time of a kernel"),
    "an infinite spread": ("spread = 9e999", "inf is no spread"),
    "negative runs": ("runs = -1", "-1 no number of runs"),
    "a negative MERE": ("mere = -0.5", "-0.5 is no MERE"),
    "no work": ("work = 'sort'", "'sort' is not a valid PartKind"),
    "an interaction of no form": ("work = 'mix', contraction = 0, around = 'twice'", "no mix has the form 'twice'"),
    "one of negative size": (
        "work = 'mix', contraction = 0, around = '-5 embeddings, rank 2'",
        "no matrix has these sizes",
    ),
}


@pytest.mark.filterwarnings("ignore::loka.errors.UncheckedWarning")
@pytest.mark.parametrize("case", ABSURD)
def test_an_absurd_row_is_an_input_error(case, tmp_path):
    path = record(tmp_path / "m.sqlite", [measurement(gemm(64, 64, 64))])
    values, says = ABSURD[case]
    loosened(path, f"UPDATE measurements SET {values}")
    with pytest.raises(InputError, match=says) as caught:
        Measurements.open(path, "h100")
    assert str(caught.value).startswith(f"{path}: damaged: ")


@pytest.mark.parametrize(("table", "column"), [("measurements", "spread"), ("versions", "finished")])
def test_a_table_without_a_column_is_an_input_error(recording, table, column):
    change(recording, f"ALTER TABLE {table} DROP COLUMN {column}")
    with pytest.raises(InputError, match=f"damaged: the columns of {table} are "):
        Measurements.open(recording, "h100")
    with pytest.raises(InputError, match=f"damaged: the columns of {table} are "):
        Recording(recording, lambda kernel: HOPPER).__enter__()


def test_figures_that_were_recorded_so_but_make_no_sense_are_refused_too(recording):
    edit(recording, "UPDATE measurements SET us = -1.0 WHERE contraction = 64")
    with pytest.raises(InputError, match="damaged: measurement of"):
        Measurements.open(recording, "h100")


def test_text_that_is_no_utf_8_is_an_input_error(recording):
    data = recording.read_bytes()
    recording.write_bytes(data.replace(b"fbgemm.rowwise", b"fbgemm.row\xffise"))
    with pytest.raises(InputError, match="damaged: Could not decode to UTF-8"):
        Measurements.open(recording, "h100")


@pytest.mark.slow
def test_every_flipped_bit_of_a_text_is_refused_or_changes_nothing(recording, tmp_path):
    text = tmp_path / "m.jsonl"
    export(recording, text, "h100", "made up")
    data, known = text.read_bytes(), contents(text)
    refused = 0
    for changed in flipped(data):
        text.write_bytes(changed)
        try:
            assert contents(text) == known
        except InputError:
            refused += 1
    assert refused > 150
