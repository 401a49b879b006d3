"""Files of measurements with bytes changed, cut off or added: read as they are, or refused, and never changed."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loka.errors import InputError
from loka.kernels.measurements.lookup import Measurements, export
from tests.support.plan.measured_cases import grid, passes, record

changes = st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=40)), min_size=1, max_size=6)
damaging = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Originals(dict[str, bytes]):
    """The bytes of an SQLite file and of its text, by suffix."""

    def __repr__(self) -> str:
        return "the bytes"


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Originals:
    folder = tmp_path_factory.mktemp("whole")
    path = record(folder / "m.sqlite", [*grid(), *passes()])
    export(path, folder / "m.jsonl", "h100", "made up")
    return Originals({each.suffix: each.read_bytes() for each in (path, folder / "m.jsonl")})


def damaged(data: bytes, places: list[tuple[int, bytes]], keep: int) -> bytes:
    """With bytes overwritten, and perhaps cut."""
    changed = bytearray(data)
    for place, new in places:
        start = place % len(changed)
        changed[start : start + len(new)] = new
    return bytes(changed[: max(keep, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".sqlite", ".jsonl"])
@damaging
@given(places=changes, keep=st.one_of(st.just(1 << 20), st.integers(1, 1 << 15)))
def test_damage_is_an_input_error_or_harmless(suffix, places, keep, originals, tmp_path):
    path = tmp_path / f"m{suffix}"
    data = damaged(originals[suffix], places, keep)
    path.write_bytes(data)
    with contextlib.suppress(InputError):  # any other error fails the test
        found = Measurements.open(path, "h100")
        assert len(found) > 0
        assert all(found.time(each.part).us > 0 for each in found.measured if not each.wrong)
    assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


@given(st.binary(max_size=300))
@damaging
def test_any_bytes_are_an_input_error(tmp_path, data):
    path = tmp_path / "m"
    path.write_bytes(data)
    with pytest.raises(InputError):
        Measurements.open(path, "h100")
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("statement", "made"),
    [
        (
            "DROP TABLE measurements; CREATE VIEW measurements AS "
            "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS id FROM n",
            "view 'measurements'",
        ),
        ("CREATE TRIGGER t AFTER INSERT ON versions BEGIN DELETE FROM versions; END", "trigger 't'"),
    ],
)
def test_a_view_or_a_trigger_is_refused_before_anything_is_read(statement, made, originals, tmp_path):
    path = tmp_path / "m.sqlite"
    path.write_bytes(originals[".sqlite"])
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(statement)
    with pytest.raises(InputError, match=f"has the {made}, which no LoKA made"):
        Measurements.open(path, "h100")
    with pytest.raises(InputError, match=f"has the {made}"):
        record(path, grid())
