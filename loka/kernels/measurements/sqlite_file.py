"""A user's measurements: an SQLite file that several processes may write at once, and that a kill does not damage.

Each measurement is a separate transaction in a write-ahead log, so that finished ones survive a kill at any moment.
When the last writer closes it properly, it is a single file again that can be copied. Several writers need a local
disk: SQLite's log does not work over a network.

Schema 2: `versions` has a row for each machine and library, `finished` the time when a recording of it was last
completed, or NULL, and `digest` a digest of its rows (`row_digests`); `measurements` has a row for each part and
versions, the newest measurement of it. Schema 1 has no digests: such a file can be read, and gets them when a recording
opens it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from loka.errors import InputError, UncheckedWarning
from loka.kernels.measurements.machine_choice import RecordedMachine, choose
from loka.kernels.measurements.measurement import MeasuredSet, Measurement
from loka.kernels.measurements.parts import Part, PartKind
from loka.kernels.measurements.row_digests import (
    FIELDS,
    MEASUREMENTS,
    VERSIONS,
    check_digests,
    fold,
    fold_all,
    read_table,
)
from loka.kernels.measurements.versions import Versions
from loka.paths import open_plain, shown

APPLICATION_ID = 0x4C6F4B41  # "LoKA": distinguishes the file from other SQLite files
SCHEMA = 2
FIRST_WITH_DIGESTS = 2
MAGIC = b"SQLite format 3\x00"
_VERSIONS_AT, _WAL = 18, 2  # where the header has the versions for writing and reading, and what they are in WAL mode
PATIENCE = 60.0  # seconds that a writer waits for others
_PAUSE = 0.02

_TABLES = """
CREATE TABLE versions (
    id INTEGER PRIMARY KEY,
    device TEXT NOT NULL, capability TEXT NOT NULL, driver TEXT NOT NULL, cuda TEXT NOT NULL, cublas TEXT NOT NULL,
    torch TEXT NOT NULL, triton TEXT NOT NULL, library TEXT NOT NULL,
    finished TEXT,
    digest TEXT NOT NULL DEFAULT '',
    UNIQUE (device, capability, driver, cuda, cublas, torch, triton, library)
) STRICT;
CREATE TABLE measurements (
    versions INTEGER NOT NULL REFERENCES versions (id),
    work TEXT NOT NULL, kernel TEXT NOT NULL, "rows" INTEGER NOT NULL, columns INTEGER NOT NULL,
    contraction INTEGER NOT NULL, dtype TEXT NOT NULL, recipe TEXT NOT NULL, around TEXT NOT NULL,
    us REAL NOT NULL, spread REAL NOT NULL, runs INTEGER NOT NULL, mere REAL, sqnr_db REAL, wrong TEXT NOT NULL,
    recorded TEXT NOT NULL,
    PRIMARY KEY (versions, work, kernel, "rows", columns, contraction, dtype, recipe, around)
) STRICT, WITHOUT ROWID;
"""
_ADD = """
INSERT INTO measurements VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET us = excluded.us, spread = excluded.spread, runs = excluded.runs, mere = excluded.mere,
    sqnr_db = excluded.sqnr_db, wrong = excluded.wrong, recorded = excluded.recorded
"""
_FIND = """
SELECT * FROM measurements WHERE versions = ? AND work = ? AND kernel = ? AND "rows" = ? AND columns = ?
    AND contraction = ? AND dtype = ? AND recipe = ? AND around = ?
"""
_FIND_VERSIONS = f"SELECT id, {FIELDS}, finished FROM versions WHERE"


class Recording:
    """Context manager that opens a file of measurements for writing. Several processes may have it open.

    Entering it raises InputError where the file is something else, damaged, of a newer LoKA, or cannot be written; the
    file is then unchanged. A missing file is created, with its folders.
    """

    def __init__(self, path: str | os.PathLike[str], versions_of: Callable[[str], Versions]) -> None:
        """`versions_of` gives the versions for a kernel's name."""
        self._path = Path(path)
        self._versions_of = versions_of
        self._connection: sqlite3.Connection | None = None
        self._ids: dict[str, int] = {}  # by kernel, for this recording
        self._ended = True

    def __enter__(self) -> Recording:
        try:
            if self._path.exists() and head_of(self._path):
                with _reading(self._path) as connection:
                    if schema := _identify(connection, self._path, may_be_new=True):
                        _tables(connection, schema)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = _patiently(lambda: _prepared(self._path))
        except OSError as error:
            raise InputError(f"{self._path}: cannot be written: {error.strerror or error}") from error
        except sqlite3.Error as error:
            raise _broken(self._path, error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        connection, self._connection = self._open, None
        try:
            if kind is None and self._ended and self._ids:
                now = _now()
                with _transaction(connection):
                    for key in sorted(set(self._ids.values())):
                        rows = connection.execute(f"{_FIND_VERSIONS} id = ?", (key,)).fetchall()
                        connection.execute("UPDATE versions SET finished = ? WHERE id = ?", (now, key))
                        rows += connection.execute(f"{_FIND_VERSIONS} id = ?", (key,)).fetchall()
                        fold(connection, key, rows)
            # A single file again; if others still write or read, the last of them does this.
            with contextlib.suppress(sqlite3.OperationalError):
                connection.execute("PRAGMA busy_timeout = 0")
                connection.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.Error as failure:
            raise _broken(self._path, failure) from failure
        finally:
            connection.close()

    def has(self, part: Part) -> bool:
        """True if a part was measured already with the versions of its kernel, by this recording or another."""
        try:
            found = self._open.execute(_FIND, (self._key(part.kernel), *_part_row(part))).fetchone()
        except sqlite3.Error as error:
            raise _broken(self._path, error) from error
        return found is not None

    def add(self, measurement: Measurement) -> None:
        """Write a measurement, replacing an earlier one of the same part; when this returns, it is on the disk.

        Raises InputError where its figures make no sense, or where the file cannot be written.
        """
        measurement.check()
        kept = measurement.rounded()
        figures = (kept.us, kept.spread, kept.runs, kept.mere, kept.sqnr_db, kept.wrong, _now())
        try:
            key = self._key(kept.part.kernel)
            place = (key, *_part_row(kept.part))
            with _transaction(self._open) as connection:
                rows = connection.execute(_FIND, place).fetchall()
                connection.execute(_ADD, (*place, *figures))
                rows += connection.execute(_FIND, place).fetchall()
                fold(connection, key, rows)
        except sqlite3.Error as error:
            raise _broken(self._path, error) from error

    def stopped_early(self) -> None:
        """Mark this recording as incomplete: it leaves parts to be measured later."""
        self._ended = False

    @property
    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise InputError(f"{self._path}: the recording is not open; use it in a `with` statement")
        return self._connection

    def _key(self, kernel: str) -> int:
        """Id of the kernel's versions in the file."""
        if kernel not in self._ids:
            row = self._versions_of(kernel).as_row()
            marks = ", ".join("?" * len(row))
            with _transaction(self._open) as connection:
                find = f"{_FIND_VERSIONS} ({FIELDS}) = ({marks})"
                found = connection.execute(find, row).fetchone()
                if found is None:
                    connection.execute(f"INSERT INTO versions ({FIELDS}) VALUES ({marks})", row)
                    found = connection.execute(find, row).fetchone()
                    fold(connection, found[0], [found])
            self._ids[kernel] = int(found[0])
        return self._ids[kernel]


def read_file(path: Path, target: str) -> MeasuredSet:
    """The measurements for a target in a file of `Recording`, of one machine (`measurement_choice.choose`).

    Raises InputError where the file is damaged, something else, of a newer LoKA, or has nothing for the target. Warns
    with UncheckedWarning if the file is too old to have digests.
    """
    with _reading(path) as connection:
        schema = _identify(connection, path, may_be_new=False)
        versions, measurements = _tables(connection, schema)
        rows = _rows(path, versions, measurements, target)
    if schema < FIRST_WITH_DIGESTS:
        warnings.warn(
            f"{path}: recorded by an earlier LoKA, without checksums: damage to it cannot be detected; "
            f"`loka bench kernels --record {path}` adds them",
            UncheckedWarning,
            stacklevel=3,
        )
    if not rows:
        raise InputError(f"{path}: {nothing_for(target, sorted({version[1] for version in versions}))}")
    return choose(rows)


def head_of(path: Path) -> bytes:
    """The first bytes of an SQLite file, b"" for an empty file. Raises InputError for any other file."""
    try:
        with open_plain(path, largest=None) as file:
            head = file.read(len(MAGIC))
    except FileNotFoundError as error:
        raise InputError(
            f"{path}: is not there; make it with `loka bench kernels --record {path}`, or check the path"
        ) from error
    except OSError as error:
        raise InputError(f"{shown(path)}: cannot be read: {error.strerror or error}; check the path") from error
    if head not in (b"", MAGIC):
        raise InputError(f"{path}: no file of measurements; name one of `loka bench kernels --record`")
    return head


def nothing_for(target: str, devices: Sequence[str]) -> str:
    """Error text for a file with measurements of these devices only."""
    known = f"it has measurements of {', '.join(devices)}" if devices else "it has no measurements yet"
    return (
        f"nothing was measured on a device of target {target}: {known}; record it on one with "
        "`loka bench kernels --record`, or name another file or target"
    )


def _tables(connection: sqlite3.Connection, schema: int) -> tuple[list[Any], list[Any]]:
    """The rows of both tables; those of `versions` end with the digest if the schema has it.

    Raises ValueError if they are damaged.
    """
    has_digests = schema >= FIRST_WITH_DIGESTS
    versions = read_table(connection, "versions", {**VERSIONS, "digest": (str,)} if has_digests else VERSIONS)
    measurements = read_table(connection, "measurements", MEASUREMENTS)
    if has_digests:
        check_digests(versions, measurements)
    return versions, measurements


def _rows(path: Path, versions: Sequence[Any], measurements: Sequence[Any], target: str) -> list[RecordedMachine]:
    rows, machines = [], {}
    for key, *fields, finished in (version[: len(VERSIONS)] for version in versions):
        machine = Versions(*fields)
        if machine.is_of(target):
            machines[key] = machine, finished is not None
    for key, work, kernel, *rest in measurements:
        if key in machines:
            measurement = Measurement(Part(PartKind(work), kernel, *rest[:6]), *rest[6:12])
            try:
                measurement.check()
            except InputError as error:
                raise _damaged(path, error) from error
            rows.append(RecordedMachine(*machines[key], rest[12], measurement))
    return rows


def _part_row(part: Part) -> tuple[str | int, ...]:
    sizes = (part.rows, part.columns, part.contraction)
    return (part.work.value, part.kernel, *sizes, part.dtype, part.recipe, part.around)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection, unless it has to roll back a transaction that was interrupted by a kill.

    Errors of the file while it is open become an InputError that names it.
    """
    address = f"{path.absolute().as_uri()}?{_access(path)}"
    try:
        with contextlib.closing(
            sqlite3.connect(address, uri=True, timeout=PATIENCE, isolation_level=None)
        ) as connection:
            connection.execute("PRAGMA trusted_schema = OFF")
            yield connection
    except sqlite3.Error as error:
        raise _broken(path, error) from error
    except (ValueError, TypeError, OverflowError) as error:  # values that no LoKA wrote
        raise _damaged(path, error) from error


def _access(path: Path) -> str:
    """How to open a file for reading, as parameters of SQLite's address."""
    if Path(f"{path}-journal").exists():
        return "mode=rw"
    # Reading a file in WAL mode would make a log and its index beside it, and leave both. Without a log nobody has the
    # file open: all of it is in the file itself.
    if _in_wal_mode(path) and not Path(f"{path}-wal").exists():
        return "mode=ro&immutable=1"
    return "mode=ro"


def _in_wal_mode(path: Path) -> bool:
    """True if a file's header says that it has a write-ahead log; False also where it cannot be read."""
    try:
        with open_plain(path, largest=None) as file:
            return _WAL in file.read(_VERSIONS_AT + 2)[_VERSIONS_AT:]
    except OSError:
        return False  # SQLite raises the error


def _identify(connection: sqlite3.Connection, path: Path, may_be_new: bool) -> int:
    """The schema, 0 for a new file. Raises InputError unless the file is valid and its schema is known.

    Begins a transaction, so that this and all later reads see one snapshot, although others may be writing.
    """
    connection.execute("BEGIN")
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (schema,) = connection.execute("PRAGMA user_version").fetchone()
    (objects,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application == 0 and schema == 0 and objects == 0:  # a recording was killed before it wrote anything
        if may_be_new:
            return 0
        raise InputError(
            f"{path}: no measurements are in it yet; record some with `loka bench kernels --record {path}`"
        )
    if application != APPLICATION_ID:
        raise InputError(f"{path}: an SQLite file, but none of `loka bench kernels --record`; name another file")
    if schema > SCHEMA:
        raise InputError(
            f"{path}: written by a newer LoKA (schema {schema}, this one reads {SCHEMA}); install that LoKA, or name "
            "another file"
        )
    if schema < 1:
        raise InputError(f"{path}: damaged: schema {schema} never was; take it from where it was kept")
    # A view in a table's place can be endless, and a trigger writes what no recording did.
    other = connection.execute("SELECT type, name FROM sqlite_master WHERE type NOT IN ('table', 'index')").fetchone()
    if other is not None:
        raise InputError(f"{path}: has the {other[0]} {other[1]!r}, which no LoKA made; take it from where it was kept")
    (state,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if state != "ok":
        raise _damaged(path, state)
    return int(schema)


def _prepared(path: Path) -> sqlite3.Connection:
    """A connection for writing, to a file that has the tables."""
    connection = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # a commit is on the disk when it returns
        with _transaction(connection):
            (schema,) = connection.execute("PRAGMA user_version").fetchone()
            if schema == 0:
                for statement in _TABLES.split(";")[:-1]:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            elif schema < FIRST_WITH_DIGESTS:
                connection.execute("ALTER TABLE versions ADD COLUMN digest TEXT NOT NULL DEFAULT ''")
                fold_all(connection)
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """A transaction; it takes the write lock at once, so that waiting for others is enough."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
    except BaseException:
        if connection.in_transaction:  # after some errors SQLite has rolled back already
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _patiently(prepare: Callable[[], sqlite3.Connection]) -> sqlite3.Connection:
    """Calls `prepare` until it succeeds: changing the journal's mode does not wait for locks as a transaction does."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return prepare()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
            if time.monotonic() > end:
                raise
            time.sleep(_PAUSE)


def _damaged(path: Path, what: object) -> InputError:
    return InputError(f"{path}: damaged: {what}; take it from where it was kept, or record it again")


def _broken(path: Path, error: sqlite3.Error) -> InputError:
    if isinstance(error, sqlite3.OperationalError) and not hasattr(error, "sqlite_errorcode"):
        return _damaged(path, error)  # raised by Python: text that is not UTF-8
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):  # the last: a table is missing
        return _damaged(path, error)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return InputError(f"{path}: another process has held it for over {PATIENCE:.0f} s; wait for it, or end it")
    return InputError(f"{path}: cannot be used: {error}; check the disk and the file's permissions")
