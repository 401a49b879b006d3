"""`loka bench`: speed on this machine's GPU, side by side with other libraries; and recordings of kernels."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loka.cli.output import Json, note, print_json, print_table
from loka.devices.targets import DEFAULT

if TYPE_CHECKING:
    from loka.bench.machine import Environment
    from loka.bench.model.model_request import ModelRequest
    from loka.bench.results import Chapter

NAME = "bench"
TEXTS = ("variant", "collective", "note", "why")  # columns of text after the first; the others hold numbers


def command(
    what: Annotated[str, typer.Argument(metavar="kernels|model", show_default=False)],
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE ...]",
            help="Policies, or a file of measurements with --export.",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Of models: train, infer, loop, reduce-overhead, captured, comma-separated. Default: all."),
    ] = None,
    variants: Annotated[
        str | None, typer.Option(help="Of models: what is compared, comma-separated. Default: all.")
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="Of models: the folder for the JSON and Markdown.")] = Path(
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
    jobs: Annotated[int, typer.Option(min=0, help="Of --record: processes that compile; 0: by the CPUs.")] = 0,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of kernels: write measurements as text.", show_default=False)
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Of --export: whose measurements. Default: " + DEFAULT.name + ".", show_default=False),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Of models: samples in a step. Default: the policy's.")] = None,
    casting: Annotated[
        str | None,
        typer.Option(
            help="Of models: autocast (float32 parameters), bfloat16 (of all), comma-separated. Default: autocast."
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Of models: turns of each variant. Default: 8.", show_default=False)
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(help="Of models: training on so many of this machine's GPUs, DDP and FSDP2.", show_default=False),
    ] = None,
    link: Annotated[
        float | None,
        typer.Option(help="Of --gpus: GB/s of a GPU, for estimates on more of them. Default: 50.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure whole steps of a policy's model, side by side with other libraries, or record times of kernels."""
    gc.enable()
    from loka.bench.options import check_options

    options = {
        "--only": only, "--variants": variants, "--record": record, "--parts": parts, "--policy": policy,
        "--seconds": None if seconds == math.inf else seconds, "--jobs": jobs or None, "--export": export,
        "--target": target, "--batch": batch, "--casting": casting, "--rounds": rounds,
        "--gpus": gpus, "--link": link,
    }  # fmt: skip
    check_options(what, [name for name, value in options.items() if value is not None])
    given = tuple(names or ())
    if what == "model":
        from loka.bench.model.model_request import ModelRequest

        show_models(ModelRequest(given, variants, only, casting, batch, rounds, seconds, gpus, link), out, as_json)
        return
    _record_and_export(given, record, parts, policy, seconds, jobs, export, target, as_json)


def _record_and_export(
    names: tuple[str, ...],
    record: Path | None,
    parts: str | None,
    policy: Path | None,
    seconds: float,
    jobs: int,
    text: Path | None,
    target: str | None,
    as_json: bool,
) -> None:
    """Measure what is missing from a file, and export measurements: of that file, or of the named one."""
    from loka.bench.options import check_recording, check_seconds
    from loka.bench.record.run_record import record_into
    from loka.kernels.measurements.lookup import export

    target = DEFAULT.name if target is None else target
    check_recording(names, record, text, target)
    check_seconds(seconds)
    lines, result = list[str](), dict[str, object]()
    if record is not None:
        tally = record_into(record, tuple(filter(None, (parts or "").split(","))), policy, note, seconds, jobs)
        lines.append(f"{record}: {tally}")
        result |= {"recorded": str(record), **asdict(tally)}
    if text is not None:
        source = record or Path(names[0])
        measured = export(source, text, target, f"loka bench kernels --record {source.name}")
        count = len(measured.measurements)
        lines.append(f"wrote {text}: {count} measurements on {measured.machine}")
        result |= {"exported": str(text), "measurements": count}
    if as_json:
        print_json(result)
    else:
        print("\n".join(lines))


def show_models(request: ModelRequest, out: Path, as_json: bool) -> None:
    """Measure whole steps of models and print the results; files are rewritten after each variant."""
    from loka.bench.model import model_report, model_request
    from loka.bench.ranks import ranks_report, ranks_run

    found: Any
    shown: Any
    if request.gpus is None:
        found, shown = model_request.run(request, out, note), model_report
    else:
        found, shown = ranks_run.run(request, out, note), ranks_report
    if as_json:
        print_json(shown.to_plain(found))
    else:
        show(found.command, found.environment, shown.chapters(found), shown.notes(found))
    note(f"wrote {out / found.stem}.json and .md" if found.models else "nothing was measured: no time was left")


def show(command: str, environment: Environment, chapters: Iterable[Chapter], notes: Iterable[str]) -> None:
    """Print a report: its tables with their titles, and how to read them."""
    print(f"{command}\n{environment}")
    for chapter in chapters:
        print(f"\n{chapter.title}{f': {chapter.text}' if chapter.text else ''}")
        for place, (columns, rows) in enumerate(chapter.tables):
            if place:
                print()
            print_table(columns, rows, numbers=[each for each in columns[1:] if each not in TEXTS])
    print("\n" + "\n".join(notes))
