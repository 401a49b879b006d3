"""The report of cells: as tables, as Markdown, as JSON, and as files."""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from loka.bench.cells import Cell
from loka.bench.machine import Environment
from loka.bench.markdown import Table, code, escaped, markdown_table
from loka.errors import InputError
from loka.paths import write_file

NOTHING = "-"
METHOD = (
    "Microseconds: the median, 10th and 90th percentile of CUDA-graph replays. Ratios are the baseline's time over the "
    "variant's. `reached` is the bound over the time; what the bound counts stands in docs/bench.md."
)


@dataclass(frozen=True, slots=True)
class Section:
    """Cells of one table. Ratios are over the variant `baseline`; the bound of the variant `shown` is printed."""

    title: str
    cells: tuple[Cell, ...]
    baseline: str = ""
    shown: str = ""


@dataclass(frozen=True, slots=True)
class BenchReport:
    """One run of a benchmark."""

    what: str  # kernels, or the name of a study
    command: str
    date: str  # UTC, to the minute: 2026-11-21T08:12Z
    environment: Environment
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()
    program: str = "loka bench kernels"

    @property
    def stem(self) -> str:
        """File name without a suffix: kernels-2026-11-21T0812."""
        return stem_of(self.what, self.date)


def ratio(section: Section, cell: Cell) -> float | None:
    """Speedup of a cell over the baseline; None if one of them was not timed."""
    for other in section.cells:
        if other.work == cell.work and other.variant == section.baseline and other.timing and cell.timing:
            return other.timing.median_us / cell.timing.median_us
    return None


def geometric_mean(section: Section, variant: str) -> float | None:
    """Geometric mean of a variant's ratios; None if it or the baseline failed on any work."""
    ratios = [ratio(section, cell) for cell in section.cells if cell.variant == variant]
    known = [value for value in ratios if value is not None]
    if not known or len(known) < len(ratios):
        return None
    return math.exp(sum(math.log(value) for value in known) / len(known))


def works_of(section: Section) -> tuple[str, ...]:
    """The pieces of work, in order."""
    return tuple(dict.fromkeys(cell.work for cell in section.cells))


def variants_of(section: Section) -> tuple[str, ...]:
    """The variants, in order."""
    return tuple(dict.fromkeys(cell.variant for cell in section.cells))


def side_by_side(section: Section) -> Table:
    """A row for each piece of work: microseconds of each variant and, in brackets, its speedup over the baseline.

    The last columns are the bound of the section's `shown` variant and the share of it reached; with several pieces of
    work, the last row is the geometric mean of the ratios.
    """
    variants, works = variants_of(section), works_of(section)
    cells = {(cell.work, cell.variant): cell for cell in section.cells}
    rows = []
    for work in works:
        texts = [_time_and_ratio(section, cells.get((work, variant))) for variant in variants]
        best = cells.get((work, section.shown))
        bound = [_number(best.bound_us if best else None), percent(best.reached if best else None)]
        rows.append((work, *texts, *(bound if section.shown else ())))
    if len(works) > 1 and section.baseline:
        means = [_bare_ratio(geometric_mean(section, variant)) for variant in variants]
        rows.append(("geometric mean", *means, *(("", "") if section.shown else ())))
    bounds = (f"bound of {section.shown}", "reached") if section.shown else ()
    return ("us", *variants, *bounds), rows


def details(section: Section) -> Table:
    """A row for each cell with spread, bound, memory and errors; empty columns are left out."""
    times = ("median us", "p10", "p90", f"over {section.baseline}")
    columns = ("work", "variant", *times, "bound us", "reached", "peak MiB", "output dB", "worst gradient dB", "note")
    rows = [_detail(section, cell) for cell in section.cells]
    return without_empty(columns, rows)


def without_empty(columns: Sequence[str], rows: Sequence[Sequence[str]], kept: int = 3) -> Table:
    """The table without columns that are NOTHING in all rows, but for the first `kept`."""
    keep = [index for index in range(len(columns)) if index < kept or any(row[index] != NOTHING for row in rows)]
    return tuple(columns[index] for index in keep), [tuple(row[index] for index in keep) for row in rows]


def _detail(section: Section, cell: Cell) -> tuple[str, ...]:
    time, errors = cell.timing, cell.errors
    worst = NOTHING
    if errors is not None and errors.gradient is not None:
        worst = f"{errors.gradient:.1f} ({errors.gradient_of})"
    return (
        cell.work,
        cell.variant,
        *(_number(value) for value in ((time.median_us, time.p10_us, time.p90_us) if time else (None, None, None))),
        _bare_ratio(ratio(section, cell)),
        _number(cell.bound_us),
        percent(cell.reached),
        f"{cell.peak_mib:.0f}" if cell.peak_mib is not None else NOTHING,
        _number(errors.output if errors else None),
        worst,
        cell.failure or NOTHING,
    )


def _time_and_ratio(section: Section, cell: Cell | None) -> str:
    if cell is None:
        return NOTHING
    if cell.timing is None:
        return "failed"
    text, over = _number(cell.timing.median_us), ratio(section, cell)
    return text if over is None or cell.variant == section.baseline else f"{text} ({over:.2f})"


def _number(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}"


def _bare_ratio(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


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


def chapters(report: BenchReport) -> list[Chapter]:
    """A chapter a section: times side by side where there are several variants, and every detail."""
    return [
        Chapter(each.title, (side_by_side(each), details(each)) if len(variants_of(each)) > 1 else (details(each),))
        for each in report.sections
    ]


def to_markdown(report: BenchReport) -> str:
    """The report as a Markdown page."""
    title = f"{report.program}, {report.date}"
    return markdown_page(title, report.command, f"{report.environment}.", chapters(report), report.notes)


def to_plain(report: BenchReport) -> dict[str, object]:
    """The report as a dict for JSON, with ratios, shares and geometric means."""
    sections: list[dict[str, object]] = []
    for section in report.sections:
        cells = [
            {**dataclasses.asdict(cell), "ratio": ratio(section, cell), "reached": cell.reached}
            for cell in section.cells
        ]
        means = {name: geometric_mean(section, name) for name in variants_of(section)} if section.baseline else {}
        sections.append(
            {"title": section.title, "baseline": section.baseline, "geometric_means": means, "cells": cells}
        )
    return {
        **plain_head(report.what, report.command, report.date, report.environment),
        "sections": sections,
        "notes": list(report.notes),
    }


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


def write_files(report: BenchReport, folder: Path) -> tuple[Path, Path]:
    """Write a report into an existing folder. Raises InputError."""
    return write_report(folder, report.stem, to_plain(report), to_markdown(report))
