"""Trains a model natively and with each recipe, from the same weights on the same batches, into a JSON lines file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.ne_calibration.recipes import StudyRecipe
from loka.bench.quality.training import NonFiniteLossError, build, train
from loka.bench.quality.training_job import TrainingJob, job_of
from loka.mods.policy_loader import load_policy
from loka.numerics.enums import Compute, Gemm
from loka.plan.examine import Examined, examine
from loka.probe.capture.live_sites import find_live
from loka.probe.gemm_errors import GemmErrors, SiteRoundings

NATIVE = "native"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StudyModel:
    """A model to train, on as much data as a study has time for; `steps` None: one pass."""

    name: str
    policy: str
    steps: int | None = None
    batch_size: int | None = None  # None: the policy's


MODELS = {
    model.name: model
    for model in (
        StudyModel("movietweetings", "policies/movietweetings.yaml"),
        StudyModel("dlrm_dcnv2", "policies/dlrm_dcnv2.yaml", 192, 512),
        StudyModel("small_ranker", "policies/small_ranker.yaml", 192, 512),
    )
}


class RowFile:
    """Rows of the study, appended as they are made, so that a stopped study goes on where it was."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: list[Row] = [json.loads(line) for line in lines]

    def has(self, **fields: object) -> bool:
        """True if a row has these fields."""
        return any(fields.items() <= row.items() for row in self.rows)

    def add(self, row: Row) -> None:
        """Append a row."""
        self.rows.append(row)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def prepared(model: StudyModel) -> tuple[TrainingJob, Examined]:
    """The job of a model's policy on the CPU, and its sites. Raises InputError."""
    policy = load_policy(model.policy)
    job = job_of(policy, model.steps, "cpu")
    return replace(job, batch_size=model.batch_size or job.batch_size), examine(policy)


def fp8_sites(examined: Examined) -> tuple[str, ...]:
    """The sites that the policy does not keep."""
    return tuple(
        site.name
        for site, wanted in zip(examined.sites, examined.settings, strict=True)
        if wanted.gemms[Gemm.FPROP].compute is not Compute.KEEP
    )


def run_with(model: nn.Module, examined: Examined, by_site: Mapping[str, SiteRoundings]) -> None:
    """Make every forward of a model run with these roundings, by the sites' names, and its backward too."""
    live = find_live(model, examined.sites)
    forward = model.forward

    def rounded(*args: Any, **kwargs: Any) -> Any:
        with GemmErrors(live, by_site):
            return forward(*args, **kwargs)

    model.forward = rounded


def train_rows(
    model: StudyModel, seed: int, recipes: Iterable[StudyRecipe], file: RowFile, tell: Callable[[str], None]
) -> None:
    """Train natively and with each recipe that the file lacks, at all FP8 sites."""
    job, examined = prepared(model)
    sites = fp8_sites(examined)
    cases = {recipe.name: dict.fromkeys(sites, recipe.roundings) for recipe in recipes}
    train_cases(model, job, examined, seed, cases, file, tell)


def train_cases(
    model: StudyModel,
    job: TrainingJob,
    examined: Examined,
    seed: int,
    cases: Mapping[str, Mapping[str, SiteRoundings]],
    file: RowFile,
    tell: Callable[[str], None],
) -> None:
    """Train natively and with the roundings of each case that the file lacks, by the case's name and the site's.

    A training that diverges has no NE (None).
    """
    for name, by_site in {NATIVE: {}, **cases}.items():
        key = {"kind": "trained", "model": model.name, "seed": seed, "recipe": name}
        if file.has(**key):
            continue
        made = build(job, seed)
        if by_site:
            run_with(made, examined, by_site)
        try:
            ne = train(made, job, seed).ne
        except NonFiniteLossError:
            ne = None
        file.add(key | {"ne": ne})
        tell(f"{model.name}, seed {seed}, {name}: NE {ne}")
