"""`loka diff`: changes between two policies or plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from loka.cli.output import Json, percent, print_json, print_line, print_table

if TYPE_CHECKING:
    from loka.plan.view.diff import ModChange, PlanDiff, RegionChange, TimeChange

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
    if change.same:
        print_line(f"Both decide the same: {percent(change.share_fp8[0])} of the training GEMM FLOPs in FP8.")
        _show_times(change)
        return
    if change.target[0] != change.target[1]:
        print_line(f"target: {change.target[0]} -> {change.target[1]}")
    if change.batch_size[0] != change.batch_size[1]:
        print_line(f"batch size: {change.batch_size[0]} -> {change.batch_size[1]}")
    for mod in change.mods:
        print_line(f"mod {mod.mod}: {mod.before}; now {mod.after}{_moved(mod)}")
    for label, names in (("added", change.added), ("removed", change.removed), ("resized", change.resized)):
        for name in names:
            print_line(f"{label}: {name}")
    if change.gemms:
        times = {each.site: _us(each) for each in change.times}
        columns = ("site", "GEMM", "before", "after", "FLOPs", "site's us", "evidence")
        rows = [
            (
                *(each.site, each.gemm.value, each.before, each.after),
                percent(each.share),
                times.get(each.site, ""),
                each.evidence,
            )
            for each in change.gemms
        ]
        shown = [place for place in range(len(columns)) if place < 5 or any(row[place] for row in rows)]
        print_table([columns[place] for place in shown], [[row[place] for place in shown] for row in rows], ("FLOPs",))
    for line in region_lines(change.regions):
        print_line(line)
    before_share, after_share = change.share_fp8
    print_line(f"FLOPs in FP8: {percent(before_share)} -> {percent(after_share)}")
    _show_times(change)


def region_lines(regions: Sequence[RegionChange]) -> list[str]:
    """`region of layers.*.up (3): linear; now linear -> silu`; sites that differ only in numbers share a line."""
    from loka.plan.format import common_pattern, pattern_of

    groups: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for each in regions:
        groups.setdefault((pattern_of(each.site), each.before, each.after), []).append(each.site)
    lines = []
    for (_, *both), sites in groups.items():
        name = sites[0] if len(sites) == 1 else f"{common_pattern(sites)} ({len(sites)})"
        before, after = (" -> ".join(ops) or "none" for ops in both)
        lines.append(f"region of {name}: {before}; now {after}")
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
    if change.total_us[0] == change.total_us[1]:
        return
    if all(change.counted) and change.counted[0] != change.counted[1]:
        from loka.plan.format import format_figure

        first, second = (format_figure(us or 0.0) for us in change.total_us)
        print_line(
            f"a training step: {first} us for {change.counted[0]}; now {second} us for {change.counted[1]}. "
            "This is not the same work: what one counts as GEMMs the other counts in interactions"
        )
        return
    print_line(f"{change.counted[1] or change.counted[0]}, a training step: {_pair(*change.total_us)} us")


def _us(change: TimeChange) -> str:
    return _pair(change.before, change.after)


def _pair(before: float | None, after: float | None) -> str:
    from loka.plan.format import format_figure

    was, now = ("-" if us is None else format_figure(us) for us in (before, after))
    return f"{was} -> {now}"
