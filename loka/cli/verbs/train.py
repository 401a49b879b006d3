"""`loka train`: the model without and with FP8, side by side."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from loka.cli.output import Json, PolicyPath, note, print_json, print_line, print_table
from loka.cli.train_and_compare import ComparisonLabels, comparison_labels
from loka.errors import InputError

if TYPE_CHECKING:
    from loka.bench.quality.training import PairResult, TrainResult
    from loka.bench.quality.training_job import TrainingJob
    from loka.plan.plan import Plan

SEEDS = 2**63 - 1  # the largest seed; torch takes no larger one
NAME = "train"

Device = Annotated[str, typer.Option(help="auto, cpu or cuda; auto takes a GPU where there is one.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Training steps. Default: the policy's, or one pass.")]


def command(
    policy: PolicyPath,
    steps: Steps = None,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS, help="Of the weights and the batches.")] = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train the model without and with the generated package, and compare the two; mods apply to both.

    The result is kept in build/train, for loka report.
    """
    gc.enable()
    from loka.bench.quality.training import train_pair
    from loka.bench.quality.training_job import adapted_job
    from loka.cli.compare_run import train_file
    from loka.cli.output import Shown
    from loka.cli.train_and_compare import fresh_package, make_job, patcher, training_of, verify
    from loka.model.callables import current_directory_importable
    from loka.mods.policy_loader import load_policy
    from loka.plan.planner import make_plan

    loaded = load_policy(policy)
    job = make_job(loaded, steps, device)
    plan = make_plan(policy)
    job, labels = adapted_job(job, plan.adaptations), comparison_labels(plan)
    package = fresh_package(plan, policy)
    with current_directory_importable(), training_of(loaded), Shown("samples") as shown:

        def progress(label: str, done: int, total: int | None) -> None:
            shown.update(labels.by_run.get(label, label), done, total)

        pair = train_pair(job, patcher(package), seed, progress, verify)
    if as_json:
        print_json(_result(pair, plan, job))
    else:
        show(pair, plan, job.device, labels, job.shared_steps)
    try:
        train_file(plan, job).add(pair)
    except InputError as error:  # the result is printed
        note(f"note: not kept for loka report: {error}")


def shared_line(steps: int) -> str:
    """A sentence about the steps that both runs of a pair share."""
    return f"Both runs share the first {steps} steps, without FP8, and go on from there."


def show(pair: PairResult, plan: Plan, device: str, labels: ComparisonLabels, shared_steps: int = 0) -> None:
    """Print the recipes of the sites, the results of both runs, and the planned speed beside theirs."""
    from loka.cli.tables.plan_table import show_speed
    from loka.plan.format import format_share
    from loka.plan.view.table import RECIPES, SIZES, cells_of, group_sites

    columns = (*SIZES, *RECIPES)
    print_table(columns, cells_of(group_sites(plan, alike=True), columns), numbers=SIZES[1:])
    print()
    as_is = pair.as_is
    print_table(
        ("", labels.first, labels.second, "difference"),
        [
            *(row for head in pair.heads for row in _metrics(pair.of_head(head), head)),
            ("training GEMM FLOPs in FP8", format_share(0.0), format_share(plan.share_fp8), ""),
        ],
        numbers=(labels.first, labels.second, "difference"),
    )
    print_line(
        f"{as_is.samples} samples in {as_is.steps} steps on {device}, seed {pair.seed}; "
        + ("every planned FP8 GEMM ran." if any(site.fp8 for site in plan.sites) else "no GEMM is planned in FP8.")
    )
    if shared_steps:
        print_line(shared_line(shared_steps))
    print()
    show_speed(plan, device, (pair,), labels)


def _metrics(pair: PairResult, head: str) -> Iterator[tuple[str, ...]]:
    """The rows of a head."""
    as_is, fp8 = pair.as_is, pair.patched
    of = f" {head}" if head else ""
    yield (f"NE{of}", f"{as_is.ne:.5f}", f"{fp8.ne:.5f}", f"{pair.ne_difference_percent:+.3f} %")
    yield (f"AUC{of}", f"{as_is.auc:.5f}", f"{fp8.auc:.5f}", f"{fp8.auc - as_is.auc:+.5f}")


def run_json(run: TrainResult) -> dict[str, object]:
    """A run for `--json`; `heads` where the policy names some."""
    return {key: value for key, value in asdict(run).items() if key != "heads" or value}


def _result(pair: PairResult, plan: Plan, job: TrainingJob) -> dict[str, object]:
    from loka.plan.totals import total_time
    from loka.plan.view.table import group_sites

    return {
        "name": plan.name,
        "device": job.device,
        "seed": pair.seed,
        "as_is": run_json(pair.as_is),
        "fp8": run_json(pair.patched),
        "ne_difference_percent": pair.ne_difference_percent,
        "shared_steps": job.shared_steps,
        "share_fp8": plan.share_fp8,
        "time": total_time(plan),
        "sites": group_sites(plan, alike=False),
    }
