"""`loka bench`: speed on this machine's GPU, side by side with other libraries; and recordings of kernels."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loka.cli.output import Json, note, print_json, print_table
from loka.devices.targets import DEFAULT_TARGET

if TYPE_CHECKING:
    from loka.bench.markdown import Table
    from loka.bench.model.model_request import ModelRequest
    from loka.bench.results import BenchReport

NAME = "bench"


def _of_a_study() -> Any:
    """An option that moved to a study of LoKA itself: it is answered with the command to run."""
    return typer.Option(hidden=True)


def command(
    what: Annotated[str, typer.Argument(metavar="kernels|model", show_default=False)],
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME ...]",
            help="Families of kernels, policies or models of the zoo (default: all), or a file of measurements with "
            "--export.",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Of models: train, infer, loop, reduce-overhead, captured, comma-separated. Default: all."),
    ] = None,
    variants: Annotated[str | None, typer.Option(help="What is compared, comma-separated. Default: all.")] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder for the JSON and Markdown.")] = Path(
        "build/bench"
    ),
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of kernels: measure parts into this file.", show_default=False)
    ] = None,
    parts: Annotated[
        str | None, typer.Option(help="Of --record: kinds of parts, comma-separated. Default: all.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Of --record: the parts that its sites need, no others.", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(help="Of models and --record: when to stop.")] = math.inf,
    jobs: Annotated[int, typer.Option(help="Of --record: processes that compile; 0: by the CPUs.")] = 0,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of kernels: write measurements as text.", show_default=False)
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Of --export: whose measurements. Default: " + DEFAULT_TARGET + ".", show_default=False),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Of models: samples in a step. Default: the policy's.")] = None,
    casting: Annotated[
        str | None,
        typer.Option(help="Of models: autocast (float32 parameters), bfloat16 (of all), or both. Default: autocast."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Of models: turns of each variant. Default: 8.", show_default=False)
    ] = None,
    form: Annotated[str | None, _of_a_study()] = None,
    ablate: Annotated[str | None, _of_a_study()] = None,
    modes: Annotated[str | None, _of_a_study()] = None,
    loss_steps: Annotated[int | None, _of_a_study()] = None,
    as_json: Json = False,
) -> None:
    """Measure speed side by side: whole steps of a policy's model, kernels. Record times of kernels."""
    gc.enable()
    from loka.bench.options import check_options

    options = {
        "--form": form, "--ablate": ablate, "--modes": modes, "--loss-steps": loss_steps,
        "--only": only, "--variants": variants, "--record": record, "--parts": parts, "--policy": policy,
        "--seconds": None if seconds == math.inf else seconds, "--jobs": jobs or None, "--export": export,
        "--target": target, "--batch": batch, "--casting": casting, "--rounds": rounds,
    }  # fmt: skip
    check_options(what, [name for name, value in options.items() if value is not None])
    given = tuple(names or ())
    if what == "model":
        from loka.bench.model.model_request import ModelRequest

        show_models(ModelRequest(given, variants, only, casting, batch, rounds, seconds), out, as_json)
        return
    from loka.bench.record.commands import RecordCommand, carry_out

    recording = RecordCommand(what, given, record, parts, policy, seconds, jobs, export, target or DEFAULT_TARGET)
    if recording.records:
        outcome = carry_out(recording, note)
        if as_json:
            print_json(outcome.plain)
        else:
            print(outcome.text)
        return
    from loka.bench.kernel_speed import KernelRequest, run
    from loka.bench.results import to_plain, write_files

    report = run(KernelRequest(given, variants), out, note)
    written = write_files(report, out)
    if as_json:
        print_json(to_plain(report))
    else:
        show(report)
    note(f"wrote {written[0]} and {written[1]}")


def show_models(request: ModelRequest, out: Path, as_json: bool) -> None:
    """Measure whole steps of models and print the results; files are rewritten after each variant."""
    from loka.bench.model import model_report
    from loka.bench.model.model_request import run

    found = run(request, out, note)
    if as_json:
        print_json(model_report.to_plain(found))
    else:
        print(f"{found.command}\n{found.environment}")
        for model in found.models:
            print(f"\n{model.name}: {model_report.heading(model)}")
            for title, tables in model_report.sections(found, model):
                print(f"\n{title}")
                for columns, rows in tables:
                    print_table(columns, rows, numbers=[each for each in columns if each not in model_report.TEXTS])
                    print()
        print("\n".join(model_report.notes(found)))
    note(f"wrote {out / found.stem}.json and .md" if found.models else "nothing was measured: no time was left")


def show(report: BenchReport) -> None:
    """Print times side by side and the details of each section."""
    from loka.bench.results import details, side_by_side, variants_of

    print(f"{report.command}\n{report.environment}")
    for section in report.sections:
        print(f"\n{section.title}")
        if len(variants_of(section)) > 1:
            _print(side_by_side(section))
            print()
        _print(details(section))
    print("\n" + "\n".join(report.notes))


def _print(table: Table) -> None:
    columns, rows = table
    print_table(columns, rows, numbers=columns[1:])
