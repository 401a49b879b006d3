"""`loka report`: measurements and decisions on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loka.cli.output import Json, PolicyPath, announce, check_not_own, note, print_json
from loka.errors import InputError
from loka.paths import check_replaceable, write_file

NAME = "report"
HTML = ".html"


def command(
    policy: PolicyPath,
    out: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="The page, FILE.html, which needs nothing else. By default build/NAME.html.",
        ),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Steps measured by loka bench model, its JSON.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a page of measurements and decisions: plan, times, errors, quality, mods, findings, and what falls short.

    It has charts, also of the runs that loka train and compare keep in build/train and build/compare.
    """
    announce(f"planning {policy}")
    from loka.bench.report.loss_curves import kept_runs
    from loka.bench.report.measured_steps import measured_steps
    from loka.bench.report.page import gather, is_html_report, to_html
    from loka.mods.policy_loader import load_policy
    from loka.plan.planner import planned

    loaded = load_policy(policy)
    out = f"build/{loaded.name}{HTML}" if out is None else out
    others = (loaded.profile_file, loaded.measurements_file, measured)
    check_not_own(out, (*loaded.named, *(each for each in others if each is not None)))
    check_replaceable(out, "a report", is_html_report)
    if Path(out).suffix.lower() != HTML:
        raise InputError(f"-o: {out}: a report is a page of HTML; name a file that ends in {HTML}")
    made = planned(policy, gains=True)
    steps = measured_steps(measured, made.plan) if measured is not None else None
    write_file(Path(out), to_html(gather(made, policy, kept_runs(made.plan), steps)))
    note(f"wrote {out}")
    if as_json:
        print_json({"name": made.plan.name, "written": out})
