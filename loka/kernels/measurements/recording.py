"""Files of measurements: JSON lines that several processes may append to, and of which a kill damages nothing.

Line 1 names the format and its version. It has the sha256 of all other lines in an exported file, and null in a
recording, which grows. Then come sections: a line with a machine, the versions of kernels' own libraries and the time
at which the recording began; a line for each kind of part; and below it a line for each measurement: rows, columns,
contraction (0 except for a GEMM), microseconds, spread, runs; for a GEMM also MERE and SQNR in dB; then the reason if
the results are wrong. Of several measurements of a part the last counts. A recording closes with a line that has the
sha256 of all lines between the first and this one, and the time if it came to its end; a kill leaves none, and the next
one makes up for it.

An exported file has one machine, sorted: equal measurements make equal bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from loka.errors import InputError
from loka.kernels.measurements.measurement import MeasuredSet, Measurement, PartSeries, Recorded, choose, digest
from loka.kernels.measurements.parts import Part, PartKind
from loka.kernels.measurements.versions import Versions
from loka.paths import open_plain, shown, write_file

FORMAT = "loka.measurements"
VERSION = 2
DATA = Path(__file__).parent / "data"  # the sets that ship, one file per target
_START = f'{{"format": "{FORMAT}"'.encode()
_RECORDING = json.dumps({"format": FORMAT, "version": VERSION, "sha256": None})  # line 1 of a recording
_SQLITE = b"SQLite format 3\x00"
_AGAIN = "take it from where it was kept, or record it again"
_DAMAGE = (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError, RecursionError, InputError)


class Recording:
    """Context manager that opens a file of measurements for appending. Several processes may have it open.

    Entering it raises InputError where the file is something else, damaged, of another version, or cannot be written;
    the file is then unchanged. A missing file is created, with its folders. A line that a kill left unfinished is cut.
    """

    def __init__(
        self, path: str | os.PathLike[str], machine: Versions, libraries: Mapping[str, str] | None = None
    ) -> None:
        """`libraries`: the versions of kernels' own libraries, by the kernel's name."""
        self._path = Path(path)
        self._section = _Section(machine.machine, dict(libraries or {}), _now())
        self._contents = _Contents()
        self._new: list[str] = []  # lines that are not yet on the disk
        self._file: FileIO | None = None
        self._asked = self._wrote = False
        self._ended = True

    def __enter__(self) -> Recording:
        try:
            if self._path.exists():
                head, _ = _lines(self._path, "", may_be_new=True)
                if head is not None and head["sha256"] is not None:
                    raise InputError(
                        f"{self._path}: an exported file, which its checksum completes; name another file to record"
                    )
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(self._path, "a+")
        except OSError as error:
            raise InputError(f"{self._path}: cannot be written: {error.strerror or error}") from error
        try:
            with self._locked():
                pass
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        file = self._open
        try:
            finished = kind is None and self._ended and self._asked
            if finished or self._wrote:
                with self._locked():
                    self._begin_section()
                    end = {"finished": _now() if finished else None, "sha256": self._contents.sha256}
                    self._write(json.dumps(end))
        finally:
            self._file = None
            file.close()

    def has(self, part: Part) -> bool:
        """True if a part was measured already with the versions of its kernel, by this recording or another."""
        self._asked = True
        self._catch_up()
        return part in self._contents.tables.get(self._section.versions(part.kernel), {})

    def add(self, measurement: Measurement) -> None:
        """Write a measurement, which replaces an earlier one of the part; when this returns, it is on the disk.

        Raises InputError where its figures make no sense, or where the file cannot be written.
        """
        measurement.check()
        self._asked = self._wrote = True
        kept = measurement.rounded()
        with self._locked():
            self._begin_section()
            if self._contents.series != PartSeries.of(kept.part):
                self._write(json.dumps(asdict(PartSeries.of(kept.part))))
            self._write(_figures(kept))

    def stopped_early(self) -> None:
        """Mark this recording as incomplete: it leaves parts to be measured later."""
        self._ended = False

    @property
    def _open(self) -> FileIO:
        if self._file is None:
            raise InputError(f"{self._path}: the recording is not open; use it in a `with` statement")
        return self._file

    def _begin_section(self) -> None:
        """The line of this machine, unless the file ends in its section."""
        if self._contents.section != self._section:
            self._write(self._section.line())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The file's lock, with everything read that others have written, and what the block writes on the disk."""
        import fcntl  # not on Windows, where files are read alone

        file = self._open
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                self._catch_up()
                file.truncate(self._contents.size)
                if not self._contents.size:
                    self._write(_RECORDING)
                yield
                data = "".join(f"{line}\n" for line in self._new).encode()
                self._new.clear()
                while data:
                    data = data[file.write(data) :]
                os.fsync(file)
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)
        except OSError as error:
            raise InputError(
                f"{self._path}: cannot be written: {error.strerror or error}; check the disk and the file's permissions"
            ) from error

    def _catch_up(self) -> None:
        """Read the whole lines that were added since."""
        self._open.seek(self._contents.size)
        added = self._open.read()
        for line in added[: added.rfind(b"\n") + 1].split(b"\n")[:-1]:
            _take(self._path, self._contents, line, _AGAIN)

    def _write(self, line: str) -> None:
        """A line for the end of the file: the lock's end writes it."""
        self._new.append(line)
        self._contents.take(line.encode())


@dataclass(frozen=True, slots=True)
class _Section:
    """A machine, the versions of kernels' own libraries, and when a recording on it began."""

    machine: Versions
    libraries: Mapping[str, str]
    date: str

    def versions(self, kernel: str) -> Versions:
        """The machine with the version of a kernel's own library."""
        return replace(self.machine, library=self.libraries.get(kernel, ""))

    def line(self) -> str:
        return json.dumps(asdict(self))


class _Contents:
    """What the lines of a file say, up to the last one taken."""

    def __init__(self) -> None:
        self.tables: dict[Versions, dict[Part, Recorded]] = {}  # the last measurement of each part
        self.finished: set[Versions] = set()  # machines with a recording that came to its end
        self.section: _Section | None = None
        self.series: PartSeries | None = None
        self._table: dict[Part, Recorded] = {}  # of the section and the series
        self.count = 0  # lines
        self.size = 0  # bytes
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """The sha256 of all lines but the first, each with its newline."""
        return self._digest.hexdigest()

    def take(self, line: bytes) -> None:
        """Take the next line. Raises one of `_DAMAGE` where no LoKA wrote it."""
        if self.count:
            self._take(json.loads(line.decode()))
            self._digest.update(line + b"\n")
        self.count += 1
        self.size += len(line) + 1

    def _take(self, row: Any) -> None:
        if isinstance(row, list):
            if self.section is None or self.series is None:
                raise ValueError("a measurement stands before its machine or its kind of part")
            measurement = _measurement(self.series, row)
            self._table[measurement.part] = Recorded(self.section.date, measurement)
        elif "machine" in row:
            date = _texts({"date": row["date"]})["date"]
            self.section = _Section(Versions(**_texts(row["machine"])), _texts(row["libraries"]), date)
            self.series = None
        elif "finished" in row:
            if row["sha256"] != self.sha256 or self.section is None:
                raise ValueError("the lines before it are not those that were recorded")
            if row["finished"] is not None:
                self.finished.add(self.section.machine)
        elif self.section is None:
            raise ValueError("a kind of part stands before its machine")
        else:
            self.series = PartSeries(**{**_texts(row), "work": PartKind(row["work"])})  # type: ignore[arg-type]
            self._table = self.tables.setdefault(self.section.versions(self.series.kernel), {})


def read_file(path: Path, target: str, advice: str = _AGAIN) -> MeasuredSet:
    """The measurements for a target in a recording or an exported file, of one machine (`choose`).

    Raises InputError where the file is damaged, something else, of another version, or has nothing for the target;
    `advice` tells what to do about a damaged file.
    """
    head, lines = _lines(path, advice)
    if head is not None and head["sha256"] is not None and digest(lines[1:]) != head["sha256"]:
        raise InputError(f"{path}: cut short or edited: its lines are not those that were exported; {advice}")
    contents = _Contents()
    for line in lines:
        _take(path, contents, line.encode(), advice)
    tables = {versions: table for versions, table in contents.tables.items() if table and versions.is_of(target)}
    if not tables:
        raise InputError(f"{path}: {_nothing_for(target, sorted({each.device for each in contents.tables}))}")
    return choose(tables, contents.finished)


def export(
    recording: str | os.PathLike[str], exported: str | os.PathLike[str], target: str, command: str
) -> MeasuredSet:
    """Write a recording's measurements for a target to a file of their own, and return them; `command` made them.

    Raises InputError as `read_file` does, if the file cannot be written, or if it would replace a recording.
    """
    path = Path(exported)
    measured = read_file(Path(recording), target)
    if path.is_file() and _is_recording(path):
        raise InputError(f"{path}: a recording stands there, which the export would replace; choose another place")
    write_file(path, to_text(measured, command))
    return measured


def to_text(measured: MeasuredSet, command: str) -> str:
    """A set as an exported file."""
    lines = list(lines_of(measured))
    head = {"format": FORMAT, "version": VERSION, "command": command, "sha256": digest(lines)}
    return "\n".join([json.dumps(head), *lines, ""])


def lines_of(measured: MeasuredSet) -> Iterator[str]:
    """All lines of an exported file except the first."""
    yield _Section(measured.machine, dict(measured.libraries), measured.date).line()
    series = None
    for each in measured.measurements:
        if series != PartSeries.of(each.part):
            series = PartSeries.of(each.part)
            yield json.dumps(asdict(series))
        yield _figures(each)


def shipped_file(target: str) -> Path:
    """Path of the set that ships for a target, which may not exist."""
    return DATA / f"{target}.jsonl"


def _lines(path: Path, advice: str, may_be_new: bool = False) -> tuple[dict[str, Any] | None, list[str]]:
    """Line 1 of a file, checked, and all whole lines; (None, []) for a file without any, if it may be new."""
    try:
        with open_plain(path) as file:
            data = file.read()
    except FileNotFoundError as error:
        raise InputError(
            f"{path}: is not there; make it with `loka bench kernels --record {path}`, or check the path"
        ) from error
    except OSError as error:
        what_to_do = "check the path" if advice in ("", _AGAIN) else advice
        raise InputError(f"{shown(path)}: cannot be read: {error.strerror or error}; {what_to_do}") from error
    if data.startswith(_SQLITE):
        raise InputError(
            f"{path}: SQLite, as LoKA 0.1 recorded; write it with LoKA 0.1 by `loka bench kernels {path} --export "
            "FILE`, and name that file"
        )
    if not data.startswith(_START[: len(data)]):
        raise InputError(f"{path}: no file of measurements; name one of `loka bench kernels --record`")
    try:
        lines = data[: data.rfind(b"\n") + 1].decode().split("\n")[:-1]
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: damaged: no UTF-8 at byte {error.start}; {advice}") from error
    if not lines:
        if may_be_new:
            return None, []
        raise InputError(f"{path}: empty; record measurements with `loka bench kernels --record {path}`")
    return _head(path, lines[0], advice), lines


def _head(path: Path, line: str, advice: str) -> dict[str, Any]:
    try:
        head: dict[str, Any] = json.loads(line)
        version, sha256 = int(head["version"]), head["sha256"]
        if not isinstance(sha256, str | None):
            raise ValueError(f"{reprlib.repr(sha256)} is no sha256")
    except _DAMAGE as error:
        raise InputError(f"{path}: damaged in line 1: {error}; {advice}") from error
    if version > VERSION:
        raise InputError(
            f"{path}: written by a newer LoKA (version {version}, this one reads {VERSION}); install that LoKA, or "
            "name another file"
        )
    if version < VERSION:
        raise InputError(
            f"{path}: written by an older LoKA (version {version}, this one reads {VERSION}); write it again with LoKA "
            "0.1 by `loka bench kernels RECORDING --export FILE`, or record it again"
        )
    return head


def _take(path: Path, contents: _Contents, line: bytes, advice: str) -> None:
    try:
        contents.take(line)
    except _DAMAGE as error:
        raise InputError(f"{path}: damaged in line {contents.count + 1}: {error}; {advice}") from error


def _nothing_for(target: str, devices: Sequence[str]) -> str:
    known = f"it has measurements of {', '.join(devices)}" if devices else "it has no measurements yet"
    return (
        f"nothing was measured on a device of target {target}: {known}; record it on one with "
        "`loka bench kernels --record`, or name another file or target"
    )


def _is_recording(path: Path) -> bool:
    """True if a file is a recording, whose measurements may exist nowhere else: also one of LoKA 0.1."""
    with open_plain(path, largest=None) as file:
        start = file.read(len(_RECORDING))
    return start == _RECORDING.encode() or start.startswith(_SQLITE)


def _figures(each: Measurement) -> str:
    """The line of a measurement."""
    part = each.part
    figures = [part.rows, part.columns, part.contraction, each.us, each.spread, each.runs]
    errors = [_written(each.mere), _written(each.sqnr_db), *([each.wrong] if each.wrong else [])]
    return json.dumps(figures if errors == [None, None] else [*figures, *errors], separators=(",", ":"))


def _texts(fields: dict[str, Any]) -> dict[str, str]:
    """Fields that all are texts. Raises ValueError where one is not."""
    for name, value in fields.items():
        if not isinstance(value, str):
            raise ValueError(f"{reprlib.repr(name)} is {reprlib.repr(value)}, which is no text")
    return fields


def _measurement(series: PartSeries, row: Sequence[Any]) -> Measurement:
    rows, columns, contraction, us, spread, runs, *errors = row
    mere, sqnr_db, *wrong = errors or (None, None)
    whole, figures = {*map(type, (rows, columns, contraction, runs))}, {*map(type, (us, spread))}
    if whole != {int} or not figures <= {int, float} or not {*map(type, wrong)} <= {str}:
        raise ValueError(f"{reprlib.repr(row)} is no row of measurements")
    part = Part(series.work, series.kernel, rows, columns, contraction, series.dtype, series.recipe, series.around)
    measurement = Measurement(part, us, spread, runs, _read(mere), _read(sqnr_db), *wrong)
    measurement.check()
    return measurement


def _written(figure: float | None) -> float | str | None:
    """A figure for JSON, which has no infinity."""
    return figure if figure is None or math.isfinite(figure) else str(figure)


def _read(figure: float | str | None) -> float | None:
    """The figure that `_written` wrote. Raises ValueError for any other."""
    if isinstance(figure, bool) or (isinstance(figure, str) and figure not in ("inf", "-inf", "nan")):
        raise ValueError(f"{reprlib.repr(figure)} is no figure")
    return None if figure is None else float(figure)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
