"""The results of an ablation: as a record, as tables, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ablation.ablation_targets import FACTORY, JudgedTarget, judged
from benchmarks.ablation.ablation_unit import Mode, UnitOutcome
from benchmarks.ablation.rows_columns import NONE, AblationRow, Column
from loka.bench.machine import Environment
from loka.bench.markdown import Table
from loka.bench.results import NOTHING, Chapter, markdown_page, plain_head, stem_of, without_empty, write_report

MODES = {"train": "one training step", "infer": "one inference"}
ON_GPU = (
    "Microseconds: the median of CUDA-graph replays; in brackets how many times the speed of torch.compile's BF16 "
    "without mods. All columns are compiled with torch.compile and captured; weights are quantized inside a training "
    "step and frozen for inference. Peak memory is of one step, the model included. Launches are the kernels of the "
    "captured graph. dB: signal to error of an inference against the same adapted model in float32."
)
ON_CPU = (
    "On a CPU nothing is compiled or captured, and FP8 runs on the reference path: the times say that all of it runs, "
    "and nothing of speed, so no ratios are given. dB: signal to error of an inference against the same adapted model "
    "in float32."
)
LOSS = (
    "Loss after {steps} steps of training under autocast to bfloat16, one seed: the mean of the last tenth of the "
    "steps, and log loss and normalised entropy on the test batches. What one seed shows is no verdict: loka compare."
)


@dataclass(frozen=True, slots=True)
class Ablation:
    """The results so far."""

    name: str  # of the policy
    factory: str
    batch: int
    command: str
    date: str  # UTC, to the minute
    environment: Environment
    on_gpu: bool
    exact: frozenset[str]
    rows: tuple[AblationRow, ...]
    columns: tuple[Column, ...]
    cells: tuple[tuple[str, Column], ...]  # the requested rows and columns
    modes: tuple[str, ...]
    loss_steps: int
    outcomes: dict[tuple[str, Column], UnitOutcome]  # by row and column; only measured cells

    @property
    def stem(self) -> str:
        """File name without a suffix: ablation-wukong_mods-2026-11-21T0812."""
        return stem_of(f"ablation-{self.name}", self.date)

    def found(self, row: str, column: Column, mode: str) -> Mode | None:
        """The result of a cell; None if it failed or was not measured."""
        outcome = self.outcomes.get((row, column))
        return outcome.modes.get(mode) if outcome is not None else None

    def time(self, row: str, column: Column, mode: str) -> float | None:
        """Median microseconds of a cell."""
        found = self.found(row, column, mode)
        return found.timing.median_us if found is not None else None

    def ratio(self, row: str, column: Column, mode: str) -> float | None:
        """Speedup over torch.compile's BF16 without mods; None on a CPU, where times say nothing."""
        base, own = self.time(NONE, Column.COMPILED, mode), self.time(row, column, mode)
        return base / own if self.on_gpu and base and own else None

    @property
    def targets(self) -> tuple[JudgedTarget, ...]:
        """The speed targets judged by these times; empty for another model and on a CPU."""
        return judged(self.rows, self.exact, self.time) if self.on_gpu and self.factory == FACTORY else ()


def tables(ablation: Ablation) -> list[tuple[str, Table]]:
    """Every table with its title."""
    made = [("rows", rows_table(ablation))]
    made += [(f"{MODES[mode]}, us", side_by_side(ablation, mode)) for mode in ablation.modes]
    made += [(f"{MODES[mode]}, each", details(ablation, mode)) for mode in ablation.modes]
    if ablation.loss_steps:
        made.append(("loss", loss_table(ablation)))
    if ablation.targets:
        made.append(("targets", targets_table(ablation)))
    return made


def rows_table(ablation: Ablation) -> Table:
    """A description of each row."""
    return ("row", "mods", "what it is"), [
        (row.name, ", ".join(row.mods) or NOTHING, row.title) for row in ablation.rows
    ]


def side_by_side(ablation: Ablation, mode: str) -> Table:
    """A line for each subset of the mods: microseconds and speedup in each column."""
    rows = [
        (row.name, *(_time_and_ratio(ablation, row.name, column, mode) for column in ablation.columns))
        for row in ablation.rows
    ]
    return ("mods", *(column.value for column in ablation.columns)), rows


def details(ablation: Ablation, mode: str) -> Table:
    """A line for each measured cell; empty columns are left out."""
    columns = ("mods", "column", "median us", "p10", "p90", "ratio", "peak MiB", "launches", "output dB")
    lines = []
    for row in ablation.rows:
        for column in ablation.columns:
            if ablation.found(row.name, column, mode) is not None:
                lines.append((row.name, column.value, *_figures(ablation, row.name, column, mode)))
    return without_empty(columns, lines)


def loss_table(ablation: Ablation) -> Table:
    """A line for each trained cell."""
    lines = []
    for row in ablation.rows:
        for column in ablation.columns:
            outcome = ablation.outcomes.get((row.name, column))
            if outcome is not None and outcome.loss is not None:
                loss = outcome.loss
                figures = tuple(f"{value:.5f}" for value in (loss.train, loss.test, loss.ne))
                lines.append((row.name, column.value, *figures))
    return ("mods", "column", "training loss", "test log loss", "test NE"), lines


def targets_table(ablation: Ablation) -> Table:
    """The speed targets and the measured ratios."""
    return ("target", "mods", "at least", "measured", "verdict"), [
        (
            each.target.title,
            each.row,
            f"{each.target.least:.2f}",
            NOTHING if each.ratio is None else f"{each.ratio:.3f}",
            each.verdict,
        )
        for each in ablation.targets
    ]


def notes(ablation: Ablation) -> list[str]:
    """Notes below the tables: how to read them, what failed, what was not measured."""
    notes = [ON_GPU if ablation.on_gpu else ON_CPU]
    if ablation.loss_steps:
        notes.append(LOSS.format(steps=ablation.loss_steps))
    for (row, column), outcome in ablation.outcomes.items():
        for why, what in outcome.reasons.items():
            notes.append(f"Failed: {row} in {column.value}{f' ({what})' if what else ''}: {why}")
    left = [f"{row} in {column.value}" for row, column in ablation.cells if (row, column) not in ablation.outcomes]
    if left:
        notes.append(f"Not measured: {', '.join(left)}.")
    return notes


def to_markdown(ablation: Ablation) -> str:
    """The ablation as a Markdown page."""
    title = f"Ablation of the mods of {ablation.name}, {ablation.date}"
    about = f"{ablation.factory} at batch size {ablation.batch}. {ablation.environment}."
    chapters = [Chapter(f"{title[0].upper()}{title[1:]}", (table,)) for title, table in tables(ablation)]
    return markdown_page(title, ablation.command, about, chapters, notes(ablation))


def to_plain(ablation: Ablation) -> dict[str, object]:
    """The ablation as a dict for JSON."""
    cells = [
        {
            "row": row.name,
            "column": column.value,
            "modes": {
                mode: {
                    **dataclasses.asdict(found),
                    "ratio": ablation.ratio(row.name, column, mode),
                }
                for mode, found in outcome.modes.items()
            },
            "loss": dataclasses.asdict(outcome.loss) if outcome.loss is not None else None,
            "failures": outcome.failures,
        }
        for row in ablation.rows
        for column in ablation.columns
        if (outcome := ablation.outcomes.get((row.name, column))) is not None
    ]
    targets = [
        {"target": each.target.title, "row": each.row, "least": each.target.least, "ratio": each.ratio,
         "verdict": each.verdict}
        for each in ablation.targets
    ]  # fmt: skip
    return {
        **plain_head("ablation", ablation.command, ablation.date, ablation.environment),
        "policy": {"name": ablation.name, "factory": ablation.factory, "batch_size": ablation.batch},
        "modes": list(ablation.modes),
        "columns": [column.value for column in ablation.columns],
        "rows": [dataclasses.asdict(row) for row in ablation.rows],
        "cells": cells,
        "targets": targets,
        "notes": notes(ablation),
    }


def write_files(ablation: Ablation, folder: Path) -> tuple[Path, Path]:
    """Write STEM.json and STEM.md into an existing folder, each atomically. Raises InputError."""
    return write_report(folder, ablation.stem, to_plain(ablation), to_markdown(ablation))


def _time_and_ratio(ablation: Ablation, row: str, column: Column, mode: str) -> str:
    time, ratio = ablation.time(row, column, mode), ablation.ratio(row, column, mode)
    if time is None:
        return "failed" if (row, column) in ablation.outcomes else NOTHING
    return _us(time) if ratio is None else f"{_us(time)} ({ratio:.3f})"


def _figures(ablation: Ablation, row: str, column: Column, mode: str) -> tuple[str, ...]:
    found, ratio = ablation.outcomes[row, column].modes[mode], ablation.ratio(row, column, mode)
    timing = found.timing
    return (
        _us(timing.median_us),
        _us(timing.p10_us),
        _us(timing.p90_us),
        NOTHING if ratio is None else f"{ratio:.3f}",
        NOTHING if found.peak_mib is None else f"{found.peak_mib:.0f}",
        NOTHING if found.launches is None else str(found.launches),
        NOTHING if found.output_db is None else f"{found.output_db:.1f}",
    )


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"
