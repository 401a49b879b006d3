"""Mutations of files: a few numbers, which hypothesis draws and shrinks, say what is changed in a whole file."""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from hypothesis import strategies as st

from loka.kernels.measurements.measurement import digest
from tests.support.fuzz.documents import ODD, ODD_YAML, Object, Raw, changed, parsed, tree_of, written

Change = tuple[int, int, int, int]
NUMBER = st.integers(0, (1 << 16) - 1)
CHANGE = st.tuples(NUMBER, NUMBER, NUMBER, NUMBER)
CHANGES = st.lists(CHANGE, min_size=1, max_size=3)
BYTE_CHANGES = st.lists(CHANGE, max_size=2)
SNIPPETS = (
    *(b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"\r", b"\n"),
    *(b"\t", b"\x1b[31m", b"\xe2\x80\xae", b"{", b"}", b"[", b"]"),
    *(b'"', b"'", b":", b": ", b"- ", b",", b"#", b"&a ", b"*a", b"!!"),
    *(b"? ", b"|", b"<<: ", b"---\n", b"...\n", b"%YAML 9.9\n"),
    *(b"NaN", b"-", b"1e999", b"9" * 5000, b"[" * 2000, b"{a: " * 2000),
    *(b"x" * 3000, b"\\u0000", b"\\ud800", b"null", b"true"),
)  # fmt: skip


def damaged(data: bytes, changes: Sequence[Change]) -> bytes:
    """Bytes flipped, cut, inserted, repeated, taken out, or zeroed."""
    for kind, place, length, put in changes:
        at = place * 7919 % (len(data) + 1)
        end = min(len(data), at + length % 64)
        snippet = SNIPPETS[put % len(SNIPPETS)]
        if kind % 7 == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << put % 8]) + data[at + 1 :]
        elif kind % 7 == 1:
            data = data[:at]
        elif kind % 7 in (2, 3):
            data = data[:at] + snippet + data[at:]
        elif kind % 7 == 4:
            data = data[:end] + data[at:end] * (1 + put % 50) + data[end:]
        elif kind % 7 == 5:
            data = data[:at] + data[end:]
        else:
            data = data[:at] + bytes(end - at) + data[end:]
    return data


def json_text(data: bytes, changes: Sequence[Change]) -> bytes:
    """A JSON document changed by its structure."""
    root = [parsed(data.decode())]
    for change in changes:
        changed(root, change, ODD)
    return "".join(map(written, root)).encode("utf-8", "surrogatepass")


def yaml_text(data: bytes, changes: Sequence[Change]) -> bytes:
    """A YAML document changed by its structure, written in the flow style."""
    root = [tree_of(yaml.safe_load(data.decode()))]
    for change in changes:
        changed(root, change, (*ODD, *ODD_YAML))
    lines = root[0].pairs if len(root) == 1 and isinstance(root[0], Object) else None
    if lines is None:
        return "".join(map(written, root)).encode("utf-8", "surrogatepass")
    text = "".join(f"{written(key) if isinstance(key, Raw) else key}: {written(value)}\n" for key, value in lines)
    return text.encode("utf-8", "surrogatepass")


def jsonl_text(data: bytes, changes: Sequence[Change]) -> bytes:
    """Lines of JSON changed by their structure; the checksum of line 1 is made anew, unless a change is to line 1."""
    root = [parsed(line) for line in data.decode().splitlines()]
    head = written(root[0])
    for change in changes:
        changed(root, change, ODD)
    lines = [written(each) for each in root]
    if lines and isinstance(root[0], Object) and lines[0] == head:
        fields = [pair for pair in root[0].pairs if pair[0] != "sha256"]
        lines[0] = written(Object([*fields, ["sha256", digest("\n".join(lines[1:]).splitlines())]]))
    return "\n".join([*lines, ""]).encode("utf-8", "surrogatepass")


METADATA = "loka.profile"
LENGTH = 8


def profile_bytes(data: bytes, changes: Sequence[Change]) -> bytes:
    """A safetensors file: the profile's header, the library's, or a tensor's values changed."""
    length = int.from_bytes(data[:LENGTH], "little")
    head, tensors = parsed(data[LENGTH : LENGTH + length].decode()), data[LENGTH + length :]
    outer = [head]
    metadata = next(pair[1] for pair in head.pairs if pair[0] == "__metadata__")
    text = next(pair for pair in metadata.pairs if pair[0] == METADATA)
    inner = [parsed(text[1])]
    for kind, *rest in changes:
        change = (kind // 8, rest[0], rest[1], rest[2])
        if kind % 8 < 5:
            changed(inner, change, ODD)
            text[1] = "".join(map(written, inner))
        elif kind % 8 < 7:
            changed(outer, change, ODD)
        elif tensors:
            at = rest[0] * 8 % len(tensors)
            value = (b"\xff" * 8, bytes(8), b"\x00" * 6 + b"\xf0\x7f", b"\x00" * 7 + b"\x80", b"\xff" * 7 + b"\x7f")
            tensors = tensors[:at] + value[rest[2] % len(value)] + tensors[at + 8 :]
    try:
        encoded = "".join(map(written, outer)).encode("utf-8", "surrogatepass")
    except RecursionError:
        return data
    return len(encoded).to_bytes(LENGTH, "little") + encoded + tensors


_VALUES = (
    *("NULL", "0", "-1", "1", "9223372036854775807", "-9223372036854775808"),
    *("0.5", "1e999", "-1e999", "5e-324", "''", "'x'"),
    *("'gemm'", "'nan'", "'inf'", "x'00ff'", "x'f0288cbc'"),
    *("zeroblob(5000)", "CAST(x'ff' AS TEXT)", "char(0, 10, 27, 8238)"),
    *("replace(hex(zeroblob(3000)), '0', 'y')", "'NVIDIA H100 80GB HBM3'"),
    *("rowid", "rows * 1000000000", "us * -1", "us / 1e9"),
)  # fmt: skip
_TABLES = ("versions", "measurements")


def sqlite_bytes(data: bytes, changes: Sequence[Change]) -> bytes:
    """A recording changed by SQL: its tables, columns, rows, and the numbers by which it is known."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.sqlite")
        path.write_bytes(data)
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            for change in changes:
                with contextlib.suppress(sqlite3.Error):  # an earlier change may leave nothing to read
                    for statement in _statements(connection, change):
                        connection.execute(statement)
        return path.read_bytes()


def _statements(connection: sqlite3.Connection, change: Change) -> list[str]:
    kind, place, which, put = change
    table = _TABLES[which % 2]
    columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")] or ["id"]
    column, value = columns[place % len(columns)], _VALUES[put % len(_VALUES)]
    loose = [
        f"CREATE TABLE copy AS SELECT * FROM {table}",
        f"DROP TABLE {table}",
        f"ALTER TABLE copy RENAME TO {table}",
    ]
    where = "" if put % 3 else f" WHERE {column} = (SELECT {column} FROM {table} LIMIT 1 OFFSET {which % 40})"
    aside = f"ALTER TABLE {table} RENAME TO other"
    return [
        [f'UPDATE OR IGNORE {table} SET "{column}" = {value}{where}'],
        [*loose, f'UPDATE {table} SET "{column}" = {value}{where}'],
        [*loose, f'ALTER TABLE {table} DROP COLUMN "{column}"'],
        [f'ALTER TABLE {table} RENAME COLUMN "{column}" TO "other"'],
        [f'ALTER TABLE {table} ADD COLUMN "{("more", "rowid", "x y")[put % 3]}" TEXT DEFAULT {value}'],
        [f"DROP TABLE {table}"],
        [aside, f"CREATE VIEW {table} AS SELECT * FROM other"],
        [aside, f"CREATE VIEW {table} AS SELECT {value} FROM other, other AS more LIMIT 9999"],
        [f"CREATE TRIGGER t AFTER UPDATE ON {table} BEGIN DELETE FROM measurements; END"],
        [f"PRAGMA application_id = {(0, 1, -1, 0x4C6F4B41)[put % 4]}"],
        [f"PRAGMA user_version = {(0, 1, 2, 3, -1, 2147483647)[put % 6]}"],
        [f"DELETE FROM {table}{where}"],
        [*loose, f"INSERT INTO {table} SELECT * FROM {table}"],
        [*loose, f"INSERT INTO {table} VALUES ({', '.join([value] * len(columns))})"],
        ["PRAGMA encoding = 'UTF-16'", "VACUUM", "PRAGMA journal_mode = WAL"],
        ["PRAGMA writable_schema = ON", f"UPDATE sqlite_master SET sql = {value} WHERE name = '{table}'"],
        ["PRAGMA writable_schema = ON", f"UPDATE sqlite_master SET {('rootpage', 'type', 'name')[put % 3]} = {value}"],
    ][kind % 17]  # fmt: skip


Mutate = Callable[[bytes, Sequence[Change]], bytes]
