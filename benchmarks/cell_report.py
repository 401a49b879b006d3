"""The report of a study's cells: as tables, as Markdown, as JSON, and as files."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cells import Cell
from loka.bench.machine import Environment
from loka.bench.markdown import Table
from loka.bench.results import (
    NOTHING,
    Chapter,
    markdown_page,
    percent,
    plain_head,
    stem_of,
    without_empty,
    write_report,
)

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
    """One run of a study."""

    what: str  # the name of the study
    command: str
    date: str  # UTC, to the minute: 2026-11-21T08:12Z
    environment: Environment
    sections: tuple[Section, ...]
    notes: tuple[str, ...]
    program: str

    @property
    def stem(self) -> str:
        """File name without a suffix: region-2026-11-21T0812."""
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


def write_files(report: BenchReport, folder: Path) -> tuple[Path, Path]:
    """Write a report into an existing folder. Raises InputError."""
    return write_report(folder, report.stem, to_plain(report), to_markdown(report))
