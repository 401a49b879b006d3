"""`loka compare`: quality against the model as it is, over paired seeds."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Annotated

import typer

from loka.cli.output import Json, PolicyPath, note, print_json, print_table
from loka.cli.train import LABELS, Device, Steps

if TYPE_CHECKING:
    from loka.bench.quality import Quality
    from loka.bench.training import PairResult

NAME = "compare"


def command(
    policy: PolicyPath,
    seeds: Annotated[int, typer.Option(min=1, help="How many pairs to train; at least 2 to tell anything.")] = 5,
    budget: Annotated[float, typer.Option(min=0.0, help="The NE that FP8 may lose, in percent.")] = 0.05,
    steps: Steps = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Compare the quality of FP8 with the model as it is; exit 1 where it is lost."""
    gc.enable()
    from loka.bench.quality import Verdict, compare
    from loka.cli.job import make_job, training_of
    from loka.cli.package import fresh_package, patcher, verify
    from loka.cli.progress import Shown
    from loka.plan.make import make_plan
    from loka.policy.load import load_policy
    from loka.sites.callables import current_directory_importable

    loaded = load_policy(policy)
    job = make_job(loaded, steps, device)
    package = fresh_package(make_plan(policy), policy)
    with current_directory_importable(), training_of(loaded), Shown("samples") as shown:
        quality = compare(
            job,
            patcher(package),
            range(seeds),
            budget,
            progress=lambda seed, label, done, total: shown.update(
                f"seed {seed} {LABELS.get(label, label)}", done, total
            ),
            check=verify,
            finished=_finished,
        )
    if as_json:
        print_json(_result(quality))
    else:
        show(quality)
    if quality.verdict is Verdict.TOLD_APART:
        note("quality is lost: FP8 can be told apart from the model as it is at 95 %, and is not within the budget")
        raise typer.Exit(1)


def show(quality: Quality) -> None:
    """Each seed, the mean with its interval, and the verdict."""
    print_table(
        ("seed", "NE as it is", "NE FP8", "difference", "AUC as it is", "AUC FP8"),
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
        numbers=("seed", "NE as it is", "NE FP8", "difference", "AUC as it is", "AUC FP8"),
    )
    line = f"NE of FP8 against the model as it is: {quality.mean:+.4f} %"
    if quality.interval is not None and quality.standard_error is not None:
        low, high = quality.interval
        line += f", standard error {quality.standard_error:.4f} %, 95 % interval {low:+.4f} % to {high:+.4f} %"
    print(f"{line}; budget {quality.budget_percent:g} %: {quality.verdict.value}")


def _finished(pair: PairResult) -> None:
    note(f"seed {pair.seed}: NE {pair.as_is.ne:.5f} as it is, {pair.patched.ne:.5f} in FP8")


def _result(quality: Quality) -> dict[str, object]:
    return {
        "verdict": quality.verdict.value,
        "budget_percent": quality.budget_percent,
        "mean_percent": quality.mean,
        "standard_error_percent": quality.standard_error,
        "interval_percent": quality.interval,
        "pairs": [
            {
                "seed": pair.seed,
                "as_is": pair.as_is,
                "fp8": pair.patched,
                "ne_difference_percent": pair.ne_difference_percent,
            }
            for pair in quality.pairs
        ],
    }
