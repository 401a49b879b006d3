"""`loka tune`: measured steps decide between the candidate plans of a policy."""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from loka.cli.output import Json, PolicyPath, note, print_json, print_line, print_table
from loka.paths import write_file

if TYPE_CHECKING:
    from loka.plan.tuning.candidates import Candidate
    from loka.plan.tuning.record import TunedRecord

NAME = "tune"
SECONDS = 300.0
COLUMNS = ("candidate", "FP8 sites", "predicted us", "step ms", "over BF16", "noise", "rounds")


def command(
    policy: PolicyPath,
    seconds: Annotated[float, typer.Option(help="The time for everything, planning and compiling too.")] = SECONDS,
    rounds: Annotated[int, typer.Option(help="Turns of each candidate.")] = 16,
    jobs: Annotated[
        int, typer.Option(min=0, help="Processes that compile candidates ahead; 0: by the CPUs and memory, 1: none.")
    ] = 0,
    synthetic: Annotated[
        bool,
        typer.Option("--synthetic", help="Measure example inputs with a synthetic loss."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the candidates and their predicted times; measure nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure whole training steps of the candidate plans on this machine's GPU, and keep the fastest."""
    gc.enable()
    from loka.mods.policy_loader import load_policy

    loaded = load_policy(policy)
    if dry_run:
        from loka.plan.tuning.candidates import Candidates

        found = Candidates(loaded).found()
        if as_json:
            plain = [
                {"title": each.title, "sites_fp8": each.sites_fp8, "predicted_us": each.predicted_us} for each in found
            ]
            print_json({"name": loaded.name, "candidates": plain})
        else:
            show_candidates(found)
        return
    from loka.bench.tune.tune import TuneLimits, tuned_here
    from loka.cli.train_and_compare import training_of
    from loka.plan.tuning.record import read_records, with_record

    known = read_records(loaded.tuned_file)  # before the work: a damaged file is no place for it
    with training_of(loaded):
        record = tuned_here(loaded, TuneLimits(seconds, rounds, jobs or None), synthetic, note)
    write_file(loaded.tuned_file, with_record(known, record))
    if as_json:
        print_json(_result(record) | {"name": loaded.name, "written": str(loaded.tuned_file)})
        return
    show(record)
    print_line(f"{verdict(record)}.")
    print_line(f"wrote {loaded.tuned_file}; next: loka generate {policy}")


def show_candidates(candidates: tuple[Candidate, ...]) -> None:
    """Print the candidates without measurements."""
    rows = [(each.title, str(each.sites_fp8), _figure(each.predicted_us, ".1f")) for each in candidates]
    print_table(COLUMNS[:3], rows, numbers=COLUMNS[1:3])


def _result(record: TunedRecord) -> dict[str, object]:
    plain = [asdict(each) for each in record.candidates]
    return {
        "verdict": verdict(record),
        "winner": record.winner,
        "bf16_ms": record.bf16_ms,
        "step": record.step,
        "machine": record.machine,
        "date": record.date,
        "candidates": [{key: value for key, value in each.items() if key != "choice"} for each in plain],
    }


def show(record: TunedRecord) -> None:
    """Print the measured candidates, the fastest first, and why others have no figures."""
    print_line(f"{record.machine}; a step: {record.step}; compiled BF16: {record.bf16_ms:.3f} ms")
    timed = sorted(record.candidates, key=lambda each: -(each.speedup or 0.0))
    rows = [
        (
            each.title,
            str(each.sites_fp8),
            _figure(each.predicted_us, ".1f"),
            _figure(each.step_ms, ".3f"),
            "-" if each.speedup is None else f"{each.speedup:.3f}x",
            "-" if each.noise is None else f"{100 * each.noise:.1f} %",
            str(each.rounds),
        )
        for each in timed
    ]
    print_table(COLUMNS, rows, numbers=COLUMNS[1:])
    for each in timed:
        if each.failure:
            print_line(f"{each.title}: {each.failure}")


def verdict(record: TunedRecord) -> str:
    """Which candidate won, and what its step takes."""
    from loka.plan.format import describe_tuned

    return f"{record.winner}: {describe_tuned(record.confirmation(''))}"


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
