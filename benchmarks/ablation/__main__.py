"""What each mod of a policy is worth: `python -m benchmarks.ablation POLICY [--only all,loka-fp8]`.

Subsets of the policy's mods are run in several ways; the files are rewritten after each measurement. Without a GPU it
runs on the CPU, and says nothing of speed.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.ablation.ablation_report import Ablation, to_markdown, to_plain, write_files
from benchmarks.ablation.ablation_run import default_jobs, run_units
from benchmarks.ablation.ablation_unit import MODES, RunSettings, UnitOutcome
from benchmarks.ablation.rows_columns import BASE, AblationRow, Column, Kinds, Unit, chosen, mods_of, rows_of, unit_of
from benchmarks.study import run_study, tell
from loka.bench.machine import environment, require_gpu
from loka.bench.options import check_least, check_seconds, listed
from loka.bench.quality.training_job import job_of
from loka.bench.results import usable_folder, utc_minute
from loka.bench.timing import Progress
from loka.mods.policy_loader import load_policy
from loka.policy.policy import Policy

PROGRAM = "python -m benchmarks.ablation"


@dataclass(frozen=True, slots=True)
class AblationWork:
    """A checked command line."""

    policy: Policy
    rows: tuple[AblationRow, ...]
    columns: tuple[Column, ...]
    units: dict[tuple[str, Column], Unit]  # of each cell, by row and column, in order
    kinds: Kinds
    wanted: RunSettings


def check(options: argparse.Namespace) -> AblationWork:
    """Check everything that can be checked before the model is built. Raises InputError."""
    check_least("--batch", options.batch)
    check_least("--loss-steps", options.loss_steps, 0)
    check_least("--jobs", options.jobs, 0)
    check_seconds(options.seconds)
    modes = listed("--modes", options.modes, MODES) or MODES
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = load_policy(options.policy)
    if options.batch is not None:
        policy = replace(policy, model=replace(policy.model, batch_size=options.batch))
    if options.loss_steps:
        job_of(policy, options.loss_steps, device)
    mods = mods_of(policy)
    kinds = Kinds.of(mods)
    rows, columns = chosen(options.only, rows_of(mods, kinds.exact))
    cells = {(BASE, Column.COMPILED): None} | {(row, column): None for row in rows for column in columns}
    units = {(row.name, column): unit_of(policy, row, column, kinds, whole=row.mods == mods) for row, column in cells}
    wanted = RunSettings(modes, options.loss_steps, device)
    columns = tuple(column for column in Column if any(column is each for _, each in units))
    return AblationWork(policy, tuple(dict.fromkeys(row for row, _ in cells)), columns, units, kinds, wanted)


def run(options: argparse.Namespace, command: str, progress: Progress) -> Ablation:
    """Check a command line and measure its units; the files in `options.out` are rewritten after each.

    Raises InputError for an invalid request, a GPU that is not a target, and a folder that cannot be written to.
    """
    work = check(options)
    if work.wanted.device == "cuda":
        require_gpu(PROGRAM)
    usable_folder(options.out)
    outcomes: dict[tuple[str, Column], UnitOutcome] = {}
    ablation = Ablation(
        name=work.policy.name,
        factory=work.policy.model.factory,
        batch=work.policy.model.batch_size,
        command=command,
        date=utc_minute(),
        environment=environment(),
        on_gpu=work.wanted.device == "cuda",
        exact=work.kinds.exact,
        rows=work.rows,
        columns=work.columns,
        cells=tuple(work.units),
        modes=work.wanted.modes,
        loss_steps=work.wanted.loss_steps,
        outcomes={},
    )
    units = tuple(dict.fromkeys(work.units.values()))
    jobs = options.jobs or default_jobs(work.wanted.device)
    for unit, outcome in run_units(units, work.wanted, jobs, options.seconds, progress):
        outcomes |= {place: outcome for place, each in work.units.items() if each == unit}
        ablation = replace(ablation, outcomes=dict(outcomes))
        write_files(ablation, options.out)
    return ablation


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="What each mod of a policy is worth.")
    parser.add_argument("policy", help="a policy with mods")
    parser.add_argument("--modes", help="train, infer; default: both")
    parser.add_argument("--only", help="rows and columns, comma-separated; default: all")
    parser.add_argument("--batch", type=int, help="samples in a step; default: the policy's")
    parser.add_argument("--loss-steps", type=int, default=0, help="training steps after which the loss is compared")
    parser.add_argument("--jobs", type=int, default=0, help="processes that prepare; 0: by the CPUs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="when to stop")
    parser.add_argument("-o", "--out", type=Path, default=Path("build/bench"), help="folder of the JSON and Markdown")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parsed(given)

    def study() -> str:
        found = run(options, f"{PROGRAM} {shlex.join(given)}", tell)
        tell(f"wrote {options.out / found.stem}.json and .md")
        return json.dumps(to_plain(found), indent=2, allow_nan=False) if options.json else to_markdown(found)

    return run_study(study)


if __name__ == "__main__":
    sys.exit(main())
