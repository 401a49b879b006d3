"""`loka generate`: the plan as code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from loka.cli.output import Json, PolicyPath, announce, print_json, print_line
from loka.errors import CheckFailedError, InputError

if TYPE_CHECKING:
    from loka.codegen.generation import GeneratedPackage
    from loka.plan.plan import Plan

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
    as_json: Json = False,
) -> None:
    """Generate the package for a policy."""
    announce(f"planning {policy}")
    from loka.cli.output import note
    from loka.cli.tables.plan_table import show_skipped
    from loka.codegen.generation import generate
    from loka.plan.evidence import over_budget_message
    from loka.plan.view.verdict import verdict

    if out is not None and not out.strip():
        raise InputError("--out is empty; name a folder, or leave the option out for generated/NAME")
    try:
        made = generate(policy, out, force=force, check=check)
    except CheckFailedError as error:
        if as_json:
            print_json({"fresh": False, "differences": str(error).splitlines()})
        raise
    over = over_budget_message(made.plan)
    empty = not any(site.fp8 for site in made.plan.sites)
    warnings = [f"{without_fp8(made.plan)}; run loka plan {policy} to see why"] if empty else []
    warnings += [over] if over else []  # the package is written anyway; `loka plan` is the check
    following = next_step(made)
    if as_json:
        print_json(result(made) | {"warnings": warnings, "next": following})
        return
    if check:
        print_line(f"{made.folder} is fresh")
        return
    show_skipped(made.plan)
    print_line(f"{verdict(made.plan)}.")
    for warning in warnings:
        note(f"warning: {warning}")
    changes = [*(f"wrote {name}" for name in made.written), *(f"removed {name}" for name in made.removed)]
    print_line(f"{made.folder}: {', '.join(changes) if changes else 'nothing to change'}")
    if following:
        note(f"next, in your script: {following}")


def next_step(made: GeneratedPackage) -> str:
    """The Python that binds a package to a model, run in this folder; "" where it changes nothing."""
    if not made.plan.bindings and not made.plan.adaptations:
        return ""
    *parents, name = made.folder.parts
    here = all(part.isidentifier() for part in parents)
    found = f"from {'.'.join(parents)} import {name}" if parents and here else f"import {name}"
    place = "" if here else f"  # with {made.folder.parent} on sys.path"
    return f"{found} as fp8; patch = fp8.apply(model){place}"


def result(made: GeneratedPackage) -> dict[str, object]:
    """A package for `--json`."""
    plan = made.plan
    return {
        "fresh": True,
        "differences": [],
        "name": plan.name,
        "folder": str(made.folder),
        "written": made.written,
        "removed": made.removed,
        "sites": len(plan.sites),
        "sites_fp8": sum(site.fp8 for site in plan.sites),
        "share_fp8": plan.share_fp8,
        "skipped": [{"owner": each.owner, "reason": each.reason, "share": each.share} for each in plan.skipped],
    }


def without_fp8(plan: Plan) -> str:
    """That a package has nothing in FP8, with the reason for the largest piece of its model."""
    from loka.plan.view.coverage import coverage_of

    largest = coverage_of(plan).largest
    why = f"{largest[0].name} stays as it is: {largest[0].reason}" if largest else "the model has no GEMM"
    return f"the package holds no FP8 site: {why}"
