"""`loka compare`: quality against the unpatched model, over paired seeds."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loka.cli.output import Json, PolicyPath, note, print_json, print_line, print_table
from loka.cli.train_and_compare import AGAINST, ORIGINAL, ComparisonLabels
from loka.cli.verbs.train import SEEDS, Device, Steps, run_json, shared_line
from loka.errors import InputError

if TYPE_CHECKING:
    from loka.bench.quality.compare_quality import Judgement, Quality
    from loka.cli.compare_run import Opened
    from loka.policy.policy import Policy

NAME = "compare"
FIRST_SEED = 1000
UNDECIDED = 3  # exit status


def command(
    policy: PolicyPath,
    seeds: Annotated[
        int, typer.Option(min=2, help="How many pairs to train at most; clear cases end after a quarter or a half.")
    ] = 64,
    first_seed: Annotated[
        int, typer.Option(min=0, max=SEEDS // 2, help="The first seed; choose recipes on others than you judge on.")
    ] = FIRST_SEED,
    draws: Annotated[
        int, typer.Option(min=1, help="How often each seed is trained, from weights that differ by 1e-6.")
    ] = 2,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that train side by side.")] = 1,
    budget: Annotated[
        float | None, typer.Option(min=0.0, help="The NE that FP8 may lose, in percent. Default: 0.02.")
    ] = None,
    steps: Steps = None,
    device: Device = "auto",
    against: Annotated[
        str, typer.Option(help="model: FP8 against it. original: the model with its mods against it without them.")
    ] = AGAINST[0],
    runs: Annotated[
        Path | None,
        typer.Option(help="Where finished pairs are kept, to go on after a stop. Default: in build/compare."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the quality of FP8 with that of the model without it, by a sequential test over paired seeds.

    Exit status: 0 if FP8 keeps the budget, 1 if it does not, 3 if more pairs are needed. If the policy's mods change
    the model, both runs have them. On a GPU both train under autocast to bfloat16, unless the policy says otherwise.
    """
    gc.enable()
    if against == AGAINST[1] and budget is not None:
        raise InputError("--budget is what FP8 may lose; --against original compares without FP8: leave one out")
    from loka.bench.quality.compare_quality import BUDGET_PERCENT, QualityVerdict, compare
    from loka.cli.compare_run import Comparison, TimeLeft, open_comparison, pair_file, trained_pairs
    from loka.cli.output import Shown
    from loka.cli.tables.plan_table import show_speed

    comparison = Comparison(policy, steps, device, against)
    opened = open_comparison(comparison)
    labels, original = opened.labels, opened.labels is ORIGINAL
    if not original:
        _check_not_tuned(opened.policy, first_seed, seeds)
    order = [(seed, draw) for seed in range(first_seed, first_seed + seeds) for draw in range(draws)]
    budget_percent = BUDGET_PERCENT if budget is None else budget
    file = pair_file(opened, first_seed, runs, None if original else budget_percent)
    if len(file):
        note(f"note: {len(file)} finished pairs are taken from {file.path}; delete it to train them again")
    judgement, interrupted = None, False
    with Shown("samples") as shown:
        pairs = trained_pairs(
            comparison, opened, order, file, jobs,
            lambda seed, run, done, total: shown.update(f"seed {seed} {labels.by_run.get(run, run)}", done, total),
        )  # fmt: skip
        left = TimeLeft(order, file)
        try:
            for judgement in compare(pairs, seeds, draws, budget_percent, early=not original):
                note(_progress(judgement, labels, str(left)))
        except KeyboardInterrupt:
            if judgement is None:
                raise
            interrupted = True
        finally:
            pairs.close()
    if judgement is None:  # `seeds` is at least 2
        raise InputError("compare: no pair was trained")
    if as_json:
        print_json(_result(judgement, opened, interrupted))
    else:
        show(judgement, labels)
        if opened.job.shared_steps:
            print_line(shared_line(opened.job.shared_steps))
        if not original:
            print()
            show_speed(opened.plan, opened.job.device, judgement.pairs, labels)
    for quality in judgement.heads if not original else ():
        if not quality.learned:
            note(
                f"note: {labels.of} has an NE{_of(quality)} of 1 or more: it predicts no better than the share of "
                "positive labels, and the verdict says nothing about one that has learned; train for longer (--steps)"
            )
    if interrupted:
        note(f"the same command goes on from {file.path}")
        raise KeyboardInterrupt
    if not original and judgement.verdict is not QualityVerdict.PARITY:
        note(_advice(judgement, labels))
        raise typer.Exit(1 if judgement.verdict is QualityVerdict.LOST else UNDECIDED)


def show(judgement: Judgement, labels: ComparisonLabels) -> None:
    """Print each pair by head, each head's mean with its interval, and the verdict (none against the original)."""
    ne, auc = ([f"{figure} {label}" for label in (labels.first, labels.second)] for figure in ("NE", "AUC"))
    worst, named = judgement.worst, bool(judgement.worst.head)
    several = worst.draw_spread is not None
    columns = (*(("head",) if named else ()), "seed", *(("draw",) if several else ()), *ne, "difference", *auc)
    print_table(
        columns,
        [
            (
                *((quality.head,) if named else ()),
                str(pair.seed),
                *((str(pair.draw),) if several else ()),
                f"{pair.as_is.ne:.5f}",
                f"{pair.patched.ne:.5f}",
                f"{pair.ne_difference_percent:+.4f} %",
                f"{pair.as_is.auc:.5f}",
                f"{pair.patched.auc:.5f}",
            )
            for quality in judgement.heads
            for pair in quality.pairs
        ],
        numbers=columns[named:],
    )
    for quality in judgement.heads:
        _show_head(quality, labels)
    if len(judgement.heads) > 1 and labels is not ORIGINAL:
        print_line(f"All {len(judgement.heads)} heads: {judgement.verdict.value}")


def _show_head(quality: Quality, labels: ComparisonLabels) -> None:
    """Print what the draws, the mean and the verdict of a head are."""
    of = _of(quality)
    if quality.draw_spread is not None:
        as_is, patched = quality.draw_spread
        print_line(
            f"Started 1e-6 apart, NE{of} of one seed spreads by {as_is:.4f} % {labels.first} and by {patched:.4f} % "
            f"{labels.running} (standard deviation)."
        )
    line = f"NE{of} of {labels.what} against {labels.of}, {len(quality.seeds)} seeds: {quality.mean:+.4f} %"
    if quality.interval is not None and quality.standard_error is not None:
        low, high = quality.interval
        line += f", standard error {quality.standard_error:.4f} %, 95 % interval {low:+.4f} % to {high:+.4f} %"
    if labels is ORIGINAL:
        print_line(f"{line}; it is another model, so that the seeds are hardly pairs")
    else:
        print_line(f"{line}; budget {quality.budget_percent:g} %: {quality.verdict.value}")


def _of(quality: Quality) -> str:
    return f" of head {quality.head}" if quality.head else ""


def _check_not_tuned(policy: Policy, first: int, seeds: int) -> None:
    """Raise InputError if the policy's recipe was chosen on one of the seeds."""
    last = first + seeds - 1
    for text in (policy.train and policy.train.tuned_seeds) or ():
        begin, end = map(int, text.split("-"))
        if first <= end and begin <= last:
            raise InputError(
                f"{policy.where('train.tuned_seeds')}: the recipe was chosen on seeds {begin} to {end}, on which it "
                f"would look better than it is; judge it on others: --first-seed {end + 1}"
            )


def _progress(judgement: Judgement, labels: ComparisonLabels, left: str) -> str:
    """A line after each seed, of the head that loses most."""
    quality = judgement.worst
    *_, pair = quality.pairs
    text = (
        f"seed {pair.seed}: NE{_of(quality)} {pair.as_is.ne:.5f} {labels.first}, {pair.patched.ne:.5f} {labels.running}"
    )
    if quality.standard_error is not None:
        text += f"; mean of {len(quality.seeds)} seeds {quality.mean:+.4f} +- {quality.standard_error:.4f} %"
    return text + left


def _advice(judgement: Judgement, labels: ComparisonLabels) -> str:
    """What a verdict other than parity means, and what to do."""
    from loka.bench.quality.compare_quality import QualityVerdict

    quality = judgement.worst
    if judgement.verdict is QualityVerdict.LOST:
        return (
            f"quality{_of(quality)} is lost: {labels.what} is worse than {labels.of} by more than the budget of "
            f"{quality.budget_percent:g} %; keep the sites that lose most (loka explain shows their errors)"
        )
    needed = judgement.seeds_needed
    if needed is None:
        return (
            f"undecided: the mean is too near to the budget of {quality.budget_percent:g} % for any number of pairs; "
            "choose another budget, or a safer recipe"
        )
    return (
        f"undecided: with this mean and spread about {max(needed - len(quality.seeds), 1)} more pairs would decide: "
        f"--seeds {max(needed, len(quality.seeds) + 1)} (a longer test is another test, and may err by 5 % again)"
    )


def _result(judgement: Judgement, opened: Opened, interrupted: bool) -> dict[str, object]:
    """The JSON of a comparison: runs are `as_is` and `fp8`, or `with_mods` if the first is the original.

    Where the policy names heads, figures are of the one that loses most, `heads` has those of each, and the NE of a
    pair is the mean over them.
    """
    from loka.plan.totals import total_time

    original = opened.labels is ORIGINAL
    worst, spread = judgement.worst, judgement.worst.draw_spread
    result: dict[str, object] = {
        "against": opened.labels.first,
        "verdict": None if original else judgement.verdict.value,
        "interrupted": interrupted,
        "budget_percent": None if original else worst.budget_percent,
        **_figures(worst),
        "seeds": len(worst.seeds),
        "seeds_planned": worst.planned,
        "seeds_needed": None if original else judgement.seeds_needed,
        "shared_steps": opened.job.shared_steps,
        "time": None if original else total_time(opened.plan),
        "spread_of_draws_percent": None if spread is None else {"as_is": spread[0], "fp8": spread[1]},
        "pairs": [
            {
                "seed": pair.seed,
                "draw": pair.draw,
                "as_is": run_json(pair.as_is),
                "with_mods" if original else "fp8": run_json(pair.patched),
                "ne_difference_percent": pair.ne_difference_percent,
            }
            for pair in judgement.pairs
        ],
    }
    if worst.head:
        result["heads"] = {
            head.head: {"verdict": None if original else head.verdict.value, **_figures(head)}
            for head in judgement.heads
        }
    return result


def _figures(quality: Quality) -> dict[str, object]:
    return {
        "mean_percent": quality.mean,
        "standard_error_percent": quality.standard_error,
        "interval_percent": quality.interval,
        "upper_bound_percent": quality.upper_bound,
    }
