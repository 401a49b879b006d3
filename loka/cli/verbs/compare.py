"""`loka compare`: quality against the unpatched model, over paired seeds."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from loka.cli.labels import AGAINST, ORIGINAL, ComparisonLabels, comparison_labels
from loka.cli.output import Json, PolicyPath, note, print_json, print_line, print_table
from loka.cli.verbs.train import Device, Steps
from loka.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from loka.bench.quality.compare_quality import Quality
    from loka.bench.quality.training import PairResult

NAME = "compare"
BUDGET = 0.05  # percent of NE


def command(
    policy: PolicyPath,
    seeds: Annotated[int, typer.Option(min=1, help="How many pairs to train; at least 2 to tell anything.")] = 5,
    budget: Annotated[
        float | None, typer.Option(min=0.0, help="The NE that FP8 may lose, in percent. Default: 0.05.")
    ] = None,
    steps: Steps = None,
    device: Device = "auto",
    against: Annotated[
        str, typer.Option(help="model: FP8 against it. original: the model with its mods against it without them.")
    ] = AGAINST[0],
    as_json: Json = False,
) -> None:
    """Compare the quality of FP8 with that of the model without it; exit 1 if quality is lost.

    If the policy's mods change the model, both runs have them.
    """
    gc.enable()
    if against == AGAINST[1] and budget is not None:
        raise InputError("--budget is what FP8 may lose; --against original compares without FP8: leave one out")
    from loka.bench.quality.adapted_job import adapted_job
    from loka.bench.quality.compare_quality import QualityVerdict, compare
    from loka.cli.cli_job import make_job, training_of
    from loka.cli.fresh_package import fresh_package, patcher, verify
    from loka.cli.progress import Shown
    from loka.mods.adapt import adapt
    from loka.mods.policy_loader import load_policy
    from loka.plan.planner import make_plan
    from loka.sites.callables import current_directory_importable

    loaded = load_policy(policy)
    job = make_job(loaded, steps, device)
    plan = make_plan(policy)
    labels = comparison_labels(plan, against)
    original = labels is ORIGINAL
    patch: Callable[[nn.Module], object]
    if original:
        patch, check = partial(adapt, adaptations=plan.adaptations), None
    else:
        job, patch, check = adapted_job(job, plan.adaptations), patcher(fresh_package(plan, policy)), verify
    with current_directory_importable(), training_of(loaded), Shown("samples") as shown:
        quality = compare(
            job,
            patch,
            range(seeds),
            BUDGET if budget is None else budget,
            progress=lambda seed, label, done, total: shown.update(
                f"seed {seed} {labels.by_run.get(label, label)}", done, total
            ),
            check=check,
            finished=lambda pair: _finished(pair, labels),
        )
    if as_json:
        print_json(_result(quality, labels))
    else:
        show(quality, labels)
    if not original and quality.verdict is QualityVerdict.TOLD_APART:
        note(f"quality is lost: FP8 can be told apart from {labels.of} at 95 %, and is not within the budget")
        raise typer.Exit(1)


def show(quality: Quality, labels: ComparisonLabels) -> None:
    """Print each seed, the mean with its interval, and the verdict (none against the original model)."""
    ne, auc = ([f"{figure} {label}" for label in (labels.first, labels.second)] for figure in ("NE", "AUC"))
    columns = ("seed", *ne, "difference", *auc)
    print_table(
        columns,
        [
            (
                str(pair.seed),
                f"{pair.as_is.ne:.5f}",
                f"{pair.patched.ne:.5f}",
                f"{pair.ne_difference_percent:+.4f} %",
                f"{pair.as_is.auc:.5f}",
                f"{pair.patched.auc:.5f}",
            )
            for pair in quality.pairs
        ],
        numbers=columns,
    )
    second = "the model with its mods" if labels is ORIGINAL else "FP8"
    line = f"NE of {second} against {labels.of}: {quality.mean:+.4f} %"
    if quality.interval is not None and quality.standard_error is not None:
        low, high = quality.interval
        line += f", standard error {quality.standard_error:.4f} %, 95 % interval {low:+.4f} % to {high:+.4f} %"
    if labels is ORIGINAL:
        print_line(f"{line}; it is another model, so that the seeds are hardly pairs")
    else:
        print_line(f"{line}; budget {quality.budget_percent:g} %: {quality.verdict.value}")


def _finished(pair: PairResult, labels: ComparisonLabels) -> None:
    note(f"seed {pair.seed}: NE {pair.as_is.ne:.5f} {labels.first}, {pair.patched.ne:.5f} {labels.running}")


def _result(quality: Quality, labels: ComparisonLabels) -> dict[str, object]:
    """The JSON of a comparison: runs are `as_is` and `fp8`, or `with_mods` if the first is the original."""
    original = labels is ORIGINAL
    return {
        "against": labels.first,
        "verdict": None if original else quality.verdict.value,
        "budget_percent": None if original else quality.budget_percent,
        "mean_percent": quality.mean,
        "standard_error_percent": quality.standard_error,
        "interval_percent": quality.interval,
        "pairs": [
            {
                "seed": pair.seed,
                "as_is": pair.as_is,
                "with_mods" if original else "fp8": pair.patched,
                "ne_difference_percent": pair.ne_difference_percent,
            }
            for pair in quality.pairs
        ],
    }
