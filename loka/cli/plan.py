"""`loka plan`: what each GEMM will run in, and why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from loka.cli.output import Json, PolicyPath, percent, print_json, print_table

if TYPE_CHECKING:
    from loka.plan.plan import Plan

NAME = "plan"
MANY = 60  # sites; above it, those that are alike are shown as one line

COLUMNS = ("site", "count", "kind", "M", "K", "N", "FLOPs", "fprop", "dgrad", "wgrad", "region")
EVIDENCE = ("MERE", "SQNR dB", "steps")  # the worst of a line; steps: sampled of all
NUMBERS = ("count", "M", "K", "N", "FLOPs")


def command(
    policy: PolicyPath,
    all_sites: Annotated[bool, typer.Option("--all", help="One line a site, however many there are.")] = False,
    as_json: Json = False,
) -> None:
    """Show what each GEMM will run in, and why."""
    from loka.errors import CheckFailedError
    from loka.plan.evidence import over_budget_words
    from loka.plan.make import make_plan
    from loka.plan.serial import to_json

    plan = make_plan(policy)
    if as_json:
        print_json(_summary(plan) | {"plan": json.loads(to_json(plan))})
    else:
        show(plan, all_sites)
    over = over_budget_words(plan)
    if over:
        raise CheckFailedError(over)


def show(plan: Plan, all_sites: bool) -> None:
    """The table, what could not be patched, and the summary."""
    from loka.plan.summary import group_sites

    grouped = len(plan.sites) > MANY and not all_sites
    rows = [
        (
            row.pattern,
            str(row.count),
            row.kind,
            row.rows,
            str(row.k),
            str(row.n),
            percent(row.share),
            *row.runs_in,
            " ".join(row.region),
            row.mere,
            row.sqnr_db,
            row.steps,
            row.reason,
        )
        for row in group_sites(plan, alike=grouped)
    ]
    hidden = set() if grouped else {"count"}
    if not any(site.region for site in plan.sites):
        hidden.add("region")
    if plan.profile is None:
        hidden.update(EVIDENCE)
    columns = (*COLUMNS, *EVIDENCE, "reason")
    keep = [index for index, column in enumerate(columns) if column not in hidden]
    print_table([columns[index] for index in keep], [[row[index] for index in keep] for row in rows], NUMBERS)
    print_skipped(plan)
    if grouped:
        print(f"{len(plan.sites)} sites in {len(rows)} groups; --all shows each.")
    print(summary_line(plan))


def print_skipped(plan: Plan) -> None:
    """A line for each module whose forward could not be rewritten."""
    for skipped in plan.skipped:
        name = f"region {skipped.owner!r}" if skipped.owner else "the model itself"
        share = f" ({percent(skipped.share)} of FLOPs)" if skipped.share else ""
        rest = "" if skipped.share else "; its sites are patched one by one"
        print(f"NOT PATCHED {name}{share}: {skipped.reason}{rest}")


def summary_line(plan: Plan) -> str:
    """How much of the model runs in FP8."""
    count = sum(site.fp8 for site in plan.sites)
    classes = "class" if len(plan.bindings) == 1 else "classes"
    return (
        f"{plan.name} for {plan.target.value} at batch size {plan.batch_size}: {percent(plan.share_fp8)} of the "
        f"training GEMM FLOPs in FP8, {count} of {len(plan.sites)} sites, {len(plan.bindings)} generated {classes}."
    )


def _summary(plan: Plan) -> dict[str, object]:
    from loka.plan.evidence import over_budget

    return {
        "name": plan.name,
        "target": plan.target.value,
        "batch_size": plan.batch_size,
        "sites": len(plan.sites),
        "sites_fp8": sum(site.fp8 for site in plan.sites),
        "share_fp8": plan.share_fp8,
        "over_budget": over_budget(plan),
        "skipped": [{"owner": each.owner, "reason": each.reason, "share": each.share} for each in plan.skipped],
    }
