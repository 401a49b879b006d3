"""`loka bench model POLICY --ablate mods` without the command line: check, measure, write reports on the way."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from loka.bench.ablation.ablation_report import Ablation, write_files
from loka.bench.ablation.ablation_run import default_jobs, run_units
from loka.bench.ablation.ablation_unit import RunSettings, UnitOutcome, checked_modes
from loka.bench.ablation.plan_rows_columns import (
    BASE,
    AblationRow,
    Column,
    Kinds,
    Unit,
    chosen,
    mods_of,
    rows_of,
    unit_of,
)
from loka.bench.machine import environment, require_gpu
from loka.bench.quality.policy_job import job_of
from loka.bench.results import usable_folder
from loka.bench.speed.comparison import Progress
from loka.errors import InputError
from loka.mods.policy_loader import load_policy
from loka.mods.registry import ModKind, mod_of, names_of
from loka.policy.policy import Policy

ABLATED = ("mods",)


@dataclass(frozen=True, slots=True)
class AblationRequest:
    """The command-line options of an ablation, unchecked."""

    what: str
    names: tuple[str, ...]
    ablate: str
    modes: str | None = None
    only: str | None = None
    batch: int | None = None  # None: the policy's
    loss_steps: int = 0
    jobs: int = 0  # processes that prepare; 0: by the CPUs
    seconds: float = math.inf

    def command(self) -> str:
        """The command line that repeats the request."""
        parts = ["loka", "bench", self.what, *self.names, "--ablate", self.ablate]
        for option, value in (("--modes", self.modes), ("--only", self.only), ("--batch", self.batch)):
            parts += [option, str(value)] if value is not None else []
        parts += ["--loss-steps", str(self.loss_steps)] if self.loss_steps else []
        return shlex.join(parts)


@dataclass(frozen=True, slots=True)
class AblationWork:
    """A checked request."""

    policy: Policy
    rows: tuple[AblationRow, ...]
    columns: tuple[Column, ...]
    units: dict[tuple[str, Column], Unit]  # of each cell, by row and column, in order
    kinds: Kinds
    wanted: RunSettings


def check(request: AblationRequest) -> AblationWork:
    """Check everything that can be checked before the model is built. Raises InputError."""
    if request.ablate not in ABLATED:
        raise InputError(f"--ablate: there is no {request.ablate!r} to ablate; write --ablate mods")
    if request.what != "model" or len(request.names) != 1:
        raise InputError("--ablate is for one policy: loka bench model POLICY --ablate mods")
    for option, value, least in (
        ("--batch", request.batch, 1),
        ("--loss-steps", request.loss_steps, 0),
        ("--jobs", request.jobs, 0),
    ):
        if value is not None and value < least:
            raise InputError(f"{option}: {value} is too few; write {least} or more")
    if math.isnan(request.seconds) or request.seconds <= 0:
        raise InputError(f"--seconds: {request.seconds:g} is no time to work in; write a number above 0")
    modes = checked_modes(request.modes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = load_policy(request.names[0])
    if request.batch is not None:
        policy = replace(policy, model=replace(policy.model, batch_size=request.batch))
    if request.loss_steps:
        job_of(policy, request.loss_steps, device)
    mods = mods_of(policy)
    kinds = kinds_of(mods)
    rows, columns = chosen(request.only, rows_of(mods, kinds.exact))
    cells = {(BASE, Column.COMPILED): None} | {(row, column): None for row in rows for column in columns}
    units = {(row.name, column): unit_of(policy, row, column, kinds, whole=row.mods == mods) for row, column in cells}
    wanted = RunSettings(modes, request.loss_steps, device)
    columns = tuple(column for column in Column if any(column is each for _, each in units))
    return AblationWork(policy, tuple(dict.fromkeys(row for row, _ in cells)), columns, units, kinds, wanted)


def kinds_of(mods: tuple[str, ...]) -> Kinds:
    """Sort these mods: those that change modules, and those that keep the function."""
    exact = frozenset(mod for mod in mods if mod_of(mod).exact)
    return Kinds(frozenset(mods) & frozenset(names_of(ModKind.MODULES)), exact)


def run(request: AblationRequest, out: Path, progress: Progress, now: datetime | None = None) -> Ablation:
    """Check a request and measure its units; the files in `out` are rewritten after each unit.

    Without a GPU it runs on the CPU. Raises InputError for an invalid request, a GPU that is not a target, and a folder
    that cannot be written to.
    """
    work = check(request)
    if work.wanted.device == "cuda":
        require_gpu()
    usable_folder(out)
    date = (now or datetime.now(UTC)).astimezone(UTC)
    outcomes: dict[tuple[str, Column], UnitOutcome] = {}
    ablation = Ablation(
        name=work.policy.name,
        factory=work.policy.model.factory,
        batch=work.policy.model.batch_size,
        command=request.command(),
        date=f"{date:%Y-%m-%dT%H:%M}Z",
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
    jobs = request.jobs or default_jobs(work.wanted.device)
    for unit, outcome in run_units(units, work.wanted, jobs, request.seconds, progress):
        outcomes |= {place: outcome for place, each in work.units.items() if each == unit}
        ablation = replace(ablation, outcomes=dict(outcomes))
        write_files(ablation, out)
    return ablation
