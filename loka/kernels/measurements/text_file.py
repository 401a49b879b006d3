"""Measurements as text, one per line, for review and for the sets that ship with the package.

Line 1 describes the file: format, version, command, and the sha256 of all other lines; line 2 describes the machine.
Then each kind of part has a line, followed by its measurements: rows, columns, contraction (0 except for a GEMM),
microseconds, spread, runs; for a GEMM also MERE and SQNR in dB; then the reason if the results are wrong. Equal
measurements make equal bytes. Version 1 wrote nulls where there is no error.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loka.errors import InputError
from loka.kernels.measurements.measurement import MeasuredSet, Measurement, PartSeries, digest
from loka.kernels.measurements.parts import Part, PartKind
from loka.kernels.measurements.sqlite_file import MAGIC, head_of, nothing_for, read_file
from loka.kernels.measurements.versions import Versions
from loka.paths import open_plain, resolved_path

FORMAT = "loka.measurements"
VERSION = 2
DATA = Path(__file__).parent / "data"  # the sets that ship, one file per target
_START = f'{{"format": "{FORMAT}"'
_AGAIN = "take it from where it was kept, or export it again"


def export(sqlite: str | os.PathLike[str], text: str | os.PathLike[str], target: str, command: str) -> MeasuredSet:
    """Write an SQLite file's measurements for a target as text, and return them; `command` made them.

    Raises InputError as `sqlite_file.read_file` does, if the file is such a text already, if the text cannot be
    written, or if it would replace an SQLite file.
    """
    source, path = Path(sqlite), Path(text)
    measured = _to_export(source, target)
    try:
        if _is_recording(path):
            raise InputError(f"{path}: a recording stands there, which the text would replace; choose another place")
        place = resolved_path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".{place.name}.{os.getpid()}")
        try:
            temporary.write_text(to_text(measured, command), encoding="utf-8", newline="\n")
            temporary.replace(place)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}; choose another place") from error
    return measured


def to_text(measured: MeasuredSet, command: str) -> str:
    """A set as text."""
    lines = list(lines_of(measured))
    head = {"format": FORMAT, "version": VERSION, "command": command, "sha256": digest(lines)}
    return "\n".join([json.dumps(head), *lines, ""])


def lines_of(measured: MeasuredSet) -> Iterator[str]:
    """All lines of a set except the first."""
    yield json.dumps(
        {"machine": asdict(measured.machine), "libraries": dict(measured.libraries), "date": measured.date}
    )
    kind = None
    for each in measured.measurements:
        if kind != PartSeries.of(each.part):
            kind = PartSeries.of(each.part)
            yield json.dumps(asdict(kind))
        part = each.part
        figures = [part.rows, part.columns, part.contraction, each.us, each.spread, each.runs]
        errors = [_written(each.mere), _written(each.sqnr_db), *([each.wrong] if each.wrong else [])]
        line = figures if errors == [None, None] else [*figures, *errors]
        yield json.dumps(line, separators=(",", ":"))


def is_text(path: Path) -> bool:
    """True if a file begins as these texts do. Raises OSError where it cannot be read."""
    with open_plain(path, largest=None) as file:
        return file.read(len(_START)) == _START.encode()


def read_text(path: Path, target: str, advice: str = _AGAIN) -> MeasuredSet:
    """Reads the set of a text. Raises InputError where it is damaged, edited, of a newer LoKA, or not for the target.

    `advice` tells what to do about a damaged file.
    """
    try:
        with open_plain(path) as file:
            text = file.read().decode()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}; {advice}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: damaged: no UTF-8 at byte {error.start}; {advice}") from error
    head, _, body = text.partition("\n")
    try:
        first = json.loads(head)
        version, sha256 = int(first["version"]), first["sha256"]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise InputError(f"{path}: damaged in line 1: {error}; {advice}") from error
    if version > VERSION:
        raise InputError(
            f"{path}: written by a newer LoKA (version {version}, this one reads {VERSION}); install that LoKA, or "
            "name another file"
        )
    if version < 1:
        raise InputError(f"{path}: damaged in line 1: version {version} never was; {advice}")
    lines = body.splitlines()
    if digest(lines) != sha256:
        raise InputError(f"{path}: cut short or edited: its lines are not those that were exported; {advice}")
    try:
        measured = _set(json.loads(f"[{','.join(lines)}]"))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError, RecursionError) as error:
        raise InputError(f"{path}: damaged: {error}; {advice}") from error
    except InputError as error:
        raise InputError(f"{path}: damaged: {error}; {advice}") from error
    if not measured.machine.is_of(target):
        raise InputError(f"{path}: {nothing_for(target, [measured.machine.device])}")
    return measured


def shipped_file(target: str) -> Path:
    """Path of the set that ships for a target, which may not exist."""
    return DATA / f"{target}.jsonl"


def _to_export(source: Path, target: str) -> MeasuredSet:
    with contextlib.suppress(OSError):  # `head_of` raises the error
        if is_text(source):
            raise InputError(f"{source}: a text already; name the file of `loka bench kernels --record`")
    head_of(source)
    return read_file(source, target)


def _is_recording(path: Path) -> bool:
    """True if the path is an SQLite file, whose measurements may exist nowhere else."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _set(rows: Sequence[Any]) -> MeasuredSet:
    about, measurements, kind = rows[0], [], None
    for row in rows[1:]:
        if isinstance(row, dict):
            kind = PartSeries(**{**_texts(row), "work": PartKind(row["work"])})  # type: ignore[arg-type]
        elif kind is None:
            raise ValueError("a measurement stands before any kind of part")
        else:
            measurements.append(_measurement(kind, row))
    machine = Versions(**_texts(about["machine"]))
    date = _texts({"date": about["date"]})["date"]
    return MeasuredSet.of(machine, _texts(about["libraries"]).items(), date, measurements)


def _texts(fields: dict[str, Any]) -> dict[str, str]:
    """Fields that all are texts. Raises ValueError where one is not."""
    for name, value in fields.items():
        if not isinstance(value, str):
            raise ValueError(f"{reprlib.repr(name)} is {reprlib.repr(value)}, which is no text")
    return fields


def _measurement(kind: PartSeries, row: Sequence[Any]) -> Measurement:
    rows, columns, contraction, us, spread, runs, *errors = row
    mere, sqnr_db, *wrong = errors or (None, None)
    whole, figures = {*map(type, (rows, columns, contraction, runs))}, {*map(type, (us, spread))}
    if whole != {int} or not figures <= {int, float} or not {*map(type, wrong)} <= {str}:
        raise ValueError(f"{reprlib.repr(row)} is no row of measurements")
    part = Part(kind.work, kind.kernel, rows, columns, contraction, kind.dtype, kind.recipe, kind.around)
    measurement = Measurement(part, us, spread, runs, _read(mere), _read(sqnr_db), *wrong)
    measurement.check()
    return measurement


def _written(figure: float | None) -> float | str | None:
    """A figure for JSON, which has no infinity."""
    return figure if figure is None or math.isfinite(figure) else str(figure)


def _read(figure: float | str | None) -> float | None:
    return None if figure is None else float(figure)
