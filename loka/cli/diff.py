"""`loka diff`: what changed between two policies or plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from loka.cli.output import Json, percent, print_json, print_table

if TYPE_CHECKING:
    from loka.plan.diff import PlanDiff

NAME = "diff"
_HELP = "A policy (.yaml) or a plan.json."


def command(
    before: Annotated[str, typer.Argument(metavar="A", help=_HELP, show_default=False)],
    after: Annotated[str, typer.Argument(metavar="B", help=_HELP, show_default=False)],
    as_json: Json = False,
) -> None:
    """Compare two policies, or plans: what runs differently, and how many FLOPs that moves."""
    from loka.plan.diff import diff
    from loka.plan.make import read_plan

    change = diff(read_plan(before), read_plan(after))
    if as_json:
        print_json(change)
    else:
        show(change)


def show(change: PlanDiff) -> None:
    """What changed, the largest first; one line where nothing did."""
    if change.same:
        print(f"Both decide the same: {percent(change.share_fp8[0])} of the training GEMM FLOPs in FP8.")
        return
    if change.target[0] != change.target[1]:
        print(f"target: {change.target[0]} -> {change.target[1]}")
    if change.batch_size[0] != change.batch_size[1]:
        print(f"batch size: {change.batch_size[0]} -> {change.batch_size[1]}")
    for label, names in (("added", change.added), ("removed", change.removed), ("resized", change.resized)):
        for name in names:
            print(f"{label}: {name}")
    if change.gemms:
        columns = ("site", "GEMM", "before", "after", "FLOPs", "evidence")
        rows = [
            (each.site, each.gemm.value, each.before, each.after, percent(each.share), each.evidence)
            for each in change.gemms
        ]
        width = len(columns) if any(each.evidence for each in change.gemms) else len(columns) - 1
        print_table(columns[:width], [row[:width] for row in rows], numbers=("FLOPs",))
    for region in change.regions:
        before, after = (" -> ".join(ops) or "none" for ops in (region.before, region.after))
        print(f"region of {region.site}: {before}; now {after}")
    before_share, after_share = change.share_fp8
    print(f"FLOPs in FP8: {percent(before_share)} -> {percent(after_share)}")
