"""Reports of what was measured: pages of Markdown, JSON, and their files."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from loka.bench.machine import Environment
from loka.bench.markdown import Table, code, escaped, markdown_table
from loka.errors import InputError
from loka.paths import write_file

NOTHING = "-"


def without_empty(columns: Sequence[str], rows: Sequence[Sequence[str]], kept: int = 3) -> Table:
    """The table without columns that are NOTHING in all rows, but for the first `kept`."""
    keep = [index for index in range(len(columns)) if index < kept or any(row[index] != NOTHING for row in rows)]
    return tuple(columns[index] for index in keep), [tuple(row[index] for index in keep) for row in rows]


def percent(share: float | None) -> str:
    """A share in whole percent, "-" for None."""
    return NOTHING if share is None else f"{100 * share:.0f} %"


@dataclass(frozen=True, slots=True)
class Chapter:
    """A part of a report for people: a title, a text ("" for none) and tables. `level`: of its heading in Markdown."""

    title: str
    tables: tuple[Table, ...] = ()
    text: str = ""
    level: int = 2


def markdown_page(title: str, command: str, about: str, chapters: Iterable[Chapter], notes: Iterable[str]) -> str:
    """A report as a Markdown page; `about` says where it is from."""
    parts = [f"# {title}", code(command), escaped(about)]
    for chapter in chapters:
        heading = f"{chapter.title[:1].upper()}{chapter.title[1:]}" if chapter.level > 2 else chapter.title
        parts += [f"{'#' * chapter.level} {escaped(heading)}", *filter(None, [escaped(chapter.text)])]
        parts += map(markdown_table, chapter.tables)
    return "\n\n".join([*parts, *notes]) + "\n"


def plain_head(what: str, command: str, date: str, environment: Environment, version: int = 1) -> dict[str, object]:
    """The first fields of every report in JSON."""
    return {
        "format": "loka.bench",
        "version": version,
        "what": what,
        "command": command,
        "date": date,
        "environment": dataclasses.asdict(environment),
    }


def utc_minute(now: datetime | None = None) -> str:
    """A time, now by default, in UTC and to the minute: 2026-11-21T08:12Z."""
    return f"{(now or datetime.now(UTC)).astimezone(UTC):%Y-%m-%dT%H:%M}Z"


def stem_of(what: str, date: str) -> str:
    """The name of a report's files without a suffix: kernels-2026-11-21T0812."""
    return f"{what}-{date.replace(':', '').removesuffix('Z')}"


def usable_folder(folder: Path) -> None:
    """Create a folder and check that it is writable. Raises InputError, before minutes are spent on measuring."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be written into ({error.strerror}); choose another folder with -o"
        ) from error


def write_report(folder: Path, stem: str, plain: dict[str, object], page: str) -> tuple[Path, Path]:
    """Write STEM.json and STEM.md into an existing folder, each atomically. Raises InputError."""
    paths = folder / f"{stem}.json", folder / f"{stem}.md"
    write_file(paths[0], json.dumps(plain, indent=2, allow_nan=False) + "\n")
    write_file(paths[1], page)
    return paths
