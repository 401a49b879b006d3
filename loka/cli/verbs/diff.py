"""`loka diff`: changes between two policies or plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from loka.cli.output import Json, print_json, print_line, print_table

if TYPE_CHECKING:
    from loka.plan.view.diff import ModChange, PlanDiff, RegionChange

NAME = "diff"
_HELP = "A policy (.yaml) or a plan.json."


def command(
    before: Annotated[str, typer.Argument(metavar="A", help=_HELP, show_default=False)],
    after: Annotated[str, typer.Argument(metavar="B", help=_HELP, show_default=False)],
    as_json: Json = False,
) -> None:
    """Compare two policies, or plans: what runs differently, and how many FLOPs that moves."""
    from loka.plan.planner import read_plan
    from loka.plan.view.diff import diff

    change = diff(read_plan(before), read_plan(after))
    if as_json:
        print_json(change)
    else:
        show(change)


def show(change: PlanDiff) -> None:
    """Print the changes, largest first; one line if there are none."""
    from loka.plan.format import format_share

    if change.same:
        print_line(f"Both decide the same: {format_share(change.share_fp8[0])} of the training GEMM FLOPs in FP8.")
        _show_times(change)
        return
    for label, pair in (("target", change.target), ("batch size", change.batch_size)):
        if pair[0] != pair[1]:
            print_line(f"{label}: {pair[0]} -> {pair[1]}")
    for mod in change.mods:
        print_line(f"mod {mod.mod}: {mod.before}; now {mod.after}{_moved(mod)}")
    for label, names in (("added", change.added), ("removed", change.removed), ("resized", change.resized)):
        for name in names:
            print_line(f"{label}: {name}")
    if change.gemms:
        times = {each.site: _pair(each.before, each.after) for each in change.times}
        columns = ("site", "GEMM", "before", "after", "FLOPs", "site's us", "evidence")
        rows = [
            (each.site, each.gemm.value, each.before, each.after, format_share(each.share), times.get(each.site, ""),
             each.evidence)
            for each in change.gemms
        ]  # fmt: skip
        shown = [place for place in range(len(columns)) if place < 5 or any(row[place] for row in rows)]
        print_table([columns[place] for place in shown], [[row[place] for place in shown] for row in rows], ("FLOPs",))
    for line in region_lines(change.regions):
        print_line(line)
    print_line(f"FLOPs in FP8: {' -> '.join(map(format_share, change.share_fp8))}")
    _show_times(change)


def region_lines(regions: Sequence[RegionChange]) -> list[str]:
    """`region of layers.*.up (3): linear; now linear -> silu`; sites that differ only in numbers share a line."""
    from loka.plan.format import common_pattern, grouped, pattern_of

    lines = []
    for group in grouped(regions, lambda each: (pattern_of(each.site), each.before, each.after)):
        count = f" ({len(group)})" if len(group) > 1 else ""
        before, after = (" -> ".join(ops) or "none" for ops in (group[0].before, group[0].after))
        lines.append(f"region of {common_pattern([each.site for each in group])}{count}: {before}; now {after}")
    return lines


def _moved(mod: ModChange) -> str:
    """Names that a mod changes in only one of the plans, if both have the mod."""
    if "-" in (mod.before, mod.after):
        return ""
    more = [f"{word} {', '.join(names)}" for word, names in (("with", mod.added), ("without", mod.removed)) if names]
    return f" ({'; '.join(more)})" if more else ""


def _show_times(change: PlanDiff) -> None:
    """Print measurements and total times if they differ."""
    before, after = (each or "none" for each in change.measurements)
    if before != after:
        print_line(f"measurements: {before} -> {after}")
    for each in change.interactions:
        count = f"{each.count[0]} -> {each.count[1]} of them, " if each.count[0] != each.count[1] else ""
        print_line(f"{each.what} in {each.owner}: {count}{each.us[0]} -> {each.us[1]} us")
    was, now = change.counted
    if change.total_us[0] == change.total_us[1]:
        return
    if was and now and was != now:
        first, _, second = _pair(*change.total_us).partition(" -> ")
        print_line(
            f"a training step: {first} us for {was}; now {second} us for {now}. This is not the same work: what one "
            "counts as GEMMs the other counts in interactions"
        )
    else:
        print_line(f"{now or was}, a training step: {_pair(*change.total_us)} us")


def _pair(before: float | None, after: float | None) -> str:
    from loka.plan.format import format_figure

    return " -> ".join("-" if us is None else format_figure(us) for us in (before, after))
