"""`loka report`: measurements and decisions on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loka.cli.output import PolicyPath, check_not_own, note, write_file
from loka.paths import check_replaceable

NAME = "report"


def command(
    policy: PolicyPath,
    out: Annotated[
        str | None, typer.Option("-o", "--out", metavar="FILE", help="Write the page to a file instead of printing it.")
    ] = None,
) -> None:
    """Write a page of measurements and decisions: plan, mods, evidence, findings, times, and what falls short."""
    from loka.bench.plan_report import TITLE, to_markdown
    from loka.mods.policy_loader import load_policy
    from loka.plan.planner import planned

    if out is not None:
        loaded = load_policy(policy)
        check_not_own(out, (*loaded.named, *filter(None, (loaded.profile_file, loaded.measurements_file))))
        check_replaceable(out, "a report", lambda head: head.split(b"\n", 1)[0].endswith(TITLE.encode()))
    page = to_markdown(planned(policy, gains=True), policy)
    if out is None:
        print(page, end="")
    else:
        write_file(Path(out), page)
        note(f"wrote {out}")
