"""`loka report`: measurements and decisions on one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loka.cli.output import Json, PolicyPath, announce_plan, check_not_own, note, print_json
from loka.errors import InputError
from loka.paths import check_replaceable, write_file

if TYPE_CHECKING:
    from loka.plan.planner import Planned

NAME = "report"
HTML, MARKDOWN = ".html", ".md"


def command(
    policy: PolicyPath,
    out: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="FILE.html: one page with charts, which needs nothing else. FILE.md: Markdown, which is printed "
            "without this option.",
        ),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Of an HTML page: steps measured by loka bench model, its JSON.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a page of measurements and decisions: plan, times, errors, quality, mods, findings, and what falls short.

    A page of HTML has charts, also of the runs that loka train and compare keep in build/train and build/compare.
    """
    announce_plan(policy)
    from loka.bench.report.markdown_page import is_markdown_report, to_markdown
    from loka.bench.report.page import is_html_report
    from loka.mods.policy_loader import load_policy
    from loka.plan.planner import planned

    if out is not None:
        loaded = load_policy(policy)
        others = (loaded.profile_file, loaded.measurements_file, measured)
        check_not_own(out, (*loaded.named, *(each for each in others if each is not None)))
        check_replaceable(out, "a report", lambda head: is_html_report(head) or is_markdown_report(head))
    suffix = MARKDOWN if out is None else _suffix(out)
    if measured is not None and suffix != HTML:
        raise InputError("--measured: measured steps are shown by an HTML page only; name one: -o FILE.html")
    made = planned(policy, gains=True)
    page = to_markdown(made, policy) if suffix == MARKDOWN else _html(made, policy, measured)
    if out is not None:
        write_file(Path(out), page)
        note(f"wrote {out}")
    if as_json:
        print_json({"name": made.plan.name, "written": out, "page": page if out is None else None})
    elif out is None:
        print(page, end="")


def _suffix(out: str) -> str:
    """The suffix that says what to write. Raises InputError for another."""
    suffix = Path(out).suffix.lower()
    if suffix not in (HTML, MARKDOWN):
        raise InputError(
            f"-o: {out}: the name of its file says what a report is, and this one ends in neither {HTML} nor "
            f"{MARKDOWN}; name one that does"
        )
    return suffix


def _html(made: Planned, policy: str, measured: Path | None) -> str:
    from loka.bench.report.loss_curves import kept_runs
    from loka.bench.report.measured_steps import measured_steps
    from loka.bench.report.page import gather, to_html

    steps = measured_steps(measured, made.plan) if measured is not None else None
    return to_html(gather(made, policy, kept_runs(made.plan), steps))
