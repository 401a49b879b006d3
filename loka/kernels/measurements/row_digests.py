"""Digests that detect damage to a recording: a missing row, or a value that differs from the recorded one.

The digest of a row of `versions` is the XOR of the hashes of this row and of each of its measurements, so that a
transaction can update it without reading the other rows. It is a column of the row itself, in hexadecimal.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

FIELDS = "device, capability, driver, cuda, cublas, torch, triton, library"
_INTEGER, _REAL, _TEXT, _MAYBE_REAL, _MAYBE_TEXT = (int,), (float,), (str,), (float, type(None)), (str, type(None))
VERSIONS = {"id": _INTEGER, **dict.fromkeys(FIELDS.split(", "), _TEXT), "finished": _MAYBE_TEXT}
MEASUREMENTS = {
    **{"versions": _INTEGER, "work": _TEXT, "kernel": _TEXT},
    **dict.fromkeys(("rows", "columns", "contraction"), _INTEGER),
    **dict.fromkeys(("dtype", "recipe", "around"), _TEXT),
    **{"us": _REAL, "spread": _REAL, "runs": _INTEGER, "mere": _MAYBE_REAL, "sqnr_db": _MAYBE_REAL},
    **{"wrong": _TEXT, "recorded": _TEXT},
}
_WORDS = {int: "whole number", float: "number", str: "text"}


def folded(digest: str, rows: Iterable[Sequence[Any]]) -> str:
    """The digest after rows are added, or removed if they are already part of it. "" is the digest of no rows."""
    number = int(digest or "0", 16)
    for row in rows:
        number ^= int.from_bytes(hashlib.sha256(json.dumps(row).encode()).digest()[:16])
    return f"{number:032x}"


def fold(connection: sqlite3.Connection, key: int, rows: Iterable[Sequence[Any]]) -> None:
    """Update the digest of one row of `versions`, as `folded`."""
    (digest,) = connection.execute("SELECT digest FROM versions WHERE id = ?", (key,)).fetchone()
    connection.execute("UPDATE versions SET digest = ? WHERE id = ?", (folded(digest, rows), key))


def fold_all(connection: sqlite3.Connection) -> None:
    """Compute all digests again from the current rows."""
    for version in list(connection.execute(f"SELECT id, {FIELDS}, finished FROM versions")):
        connection.execute("UPDATE versions SET digest = '' WHERE id = ?", version[:1])
        rows = connection.execute("SELECT * FROM measurements WHERE versions = ?", version[:1])
        fold(connection, version[0], [version, *rows])


def read_table(connection: sqlite3.Connection, table: str, columns: dict[str, tuple[type, ...]]) -> list[Any]:
    """All rows of a table. Raises ValueError for other columns, and for a value of the wrong type."""
    cursor = connection.execute(f"SELECT * FROM {table}")
    names = [each[0] for each in cursor.description]
    if names != list(columns):
        raise ValueError(f"the columns of {table} are {', '.join(names)}, not {', '.join(columns)}")
    rows = cursor.fetchall()
    types = list(columns.values())
    for number, row in enumerate(rows, 1):
        for value, allowed, name in zip(row, types, names, strict=True):
            if type(value) not in allowed:
                shown = reprlib.repr(value)
                raise ValueError(f"row {number} of {table}: its {name} is {shown}, which is no {_WORDS[allowed[0]]}")
    return rows


def check_digests(versions: Sequence[Sequence[Any]], measurements: Sequence[Sequence[Any]]) -> None:
    """Raises ValueError unless the rows match their digests. Each row of `versions` ends with its digest."""
    rows: dict[int, list[Sequence[Any]]] = {version[0]: [version[:-1]] for version in versions}
    for row in measurements:
        if row[0] not in rows:
            raise ValueError(f"versions {row[0]}, which measurements are of, are not there")
        rows[row[0]].append(row)
    for *version, digest in versions:
        if folded("", rows[version[0]]) != digest:
            raise ValueError(f"what was measured on {version[1]} (versions {version[0]}) is not what was recorded")
