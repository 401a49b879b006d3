"""`loka generate`: the plan as code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loka.cli.output import PolicyPath

NAME = "generate"


def command(
    policy: PolicyPath,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 where the package is stale, edited or missing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that were edited.")] = False,
    out: Annotated[
        str | None,
        typer.Option(
            "-o", "--out", metavar="DIR", help="The package's folder. Default: generated/NAME.", show_default=False
        ),
    ] = None,
) -> None:
    """Generate the package for a policy."""
    from loka.cli.fresh_package import default_folder
    from loka.cli.output import note
    from loka.cli.verbs.plan import print_skipped, summary_line
    from loka.codegen import check_package, render_package, write_package
    from loka.errors import CheckFailedError
    from loka.plan.evidence import over_budget_words
    from loka.plan.planner import make_plan

    plan = make_plan(policy)
    files = render_package(plan)
    folder = Path(out) if out else default_folder(plan.name)
    if check:
        differences = check_package(files, folder)
        if differences:
            raise CheckFailedError("\n".join(f"{folder}/{difference}" for difference in differences))
        print(f"{folder} is fresh")
        return
    written = write_package(files, folder, force)
    print_skipped(plan)
    print(summary_line(plan))
    over = over_budget_words(plan)
    if over:
        note(f"warning: {over}")  # what is forced is written; `loka plan` is the check
    changes = [*(f"wrote {name}" for name in written.written), *(f"removed {name}" for name in written.removed)]
    print(f"{folder}: {', '.join(changes) if changes else 'nothing to change'}")
