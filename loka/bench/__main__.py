"""`python -m loka.bench`: what `loka bench` does, where typer and rich are not installed."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from loka.bench.record.commands import WHAT as RECORDED
from loka.bench.record.commands import Command, carry_out
from loka.bench.record.grid import PARTS
from loka.bench.results import to_plain, to_text, write_files
from loka.bench.speed.request import FORMS, ONLY, WHAT, Request, run
from loka.errors import LokaError


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the files; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m loka.bench", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", metavar="|".join((*WHAT, *RECORDED)))
    parser.add_argument(
        "names", nargs="*", help="M,N,K for region; models; families of kernels; files of measurements; default: all"
    )
    parser.add_argument("--form", help=f"of the regions: {' or '.join(FORMS)}")
    parser.add_argument("--only", help=f"{' or '.join(ONLY)}; with --ablate rows and columns")
    parser.add_argument("--variants", help="comma-separated; default: all")
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/results"), help="folder for the JSON and Markdown")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--record", type=Path, metavar="FILE", help="of kernels: measure parts into this file")
    parser.add_argument("--parts", help=f"of --record: {', '.join(PARTS)}; default: all")
    parser.add_argument(
        "--policy", type=Path, help="of --record: the parts that this policy's sites need, and no others"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="of --record and --ablate: when to stop")
    parser.add_argument("--jobs", type=int, default=0, help="of both: processes that compile; default: by the CPUs")
    parser.add_argument("--export", type=Path, metavar="FILE", help="of kernels: write measurements as text")
    parser.add_argument("--target", default="h100", help="whose measurements are exported, mapped or compared")
    parser.add_argument("--ablate", metavar="mods", help="of a policy: with each subset of its mods")
    parser.add_argument("--modes", help="of --ablate: train, infer; default: both")
    parser.add_argument("--batch", type=int, help="of --ablate: samples in a step; default: the policy's")
    parser.add_argument("--loss-steps", type=int, default=0, help="of --ablate: train so many steps, compare the loss")
    options = parser.parse_args(arguments)
    if options.ablate is not None or options.modes is not None or options.batch is not None or options.loss_steps:
        return ablated(options)
    order = Command(
        options.what, tuple(options.names), options.record, options.parts, options.policy, options.seconds,
        options.jobs, options.export, options.target, options.variants, options.out,
    )  # fmt: skip
    if order.of_records:
        return done(order, options.json)
    request = Request(options.what, tuple(options.names), options.form, options.only, options.variants)
    try:
        report = run(request, options.out, tell)
        written = write_files(report, options.out)
    except LokaError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    print(json.dumps(to_plain(report), indent=2, allow_nan=False) if options.json else to_text(report))
    print(f"wrote {written[0]} and {written[1]}", file=sys.stderr)
    return 0


def ablated(options: argparse.Namespace) -> int:
    """Measure with each subset of a policy's mods, and print what was found; returns the exit status."""
    from loka.bench.ablation import (  # pydantic reads policies, and need not be there for the rest
        ablate,
        ablation_report,
    )

    asked = ablate.AblationRequest(
        options.what, tuple(options.names), options.ablate or "", options.modes, options.only, options.batch,
        options.loss_steps, options.jobs, options.seconds,
    )  # fmt: skip
    try:
        found = ablate.run(asked, options.out, tell)
    except LokaError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    plain = json.dumps(ablation_report.to_plain(found), indent=2, allow_nan=False)
    print(plain if options.json else ablation_report.to_text(found))
    print(f"wrote {options.out / found.stem}.json and .md", file=sys.stderr)
    return 0


def done(order: Command, as_json: bool) -> int:
    """Carry an order out and print what came of it; returns the exit status."""
    try:
        outcome = carry_out(order, tell)
    except LokaError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    print(json.dumps(outcome.plain, indent=2, allow_nan=False) if as_json else outcome.text)
    return 0


def tell(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
