"""`loka diff`: changes between two policies or plans."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from loka.cli.output import Json, print_json, print_line

if TYPE_CHECKING:
    from loka.plan.plan import Plan
    from loka.plan.view.diff import ModChange, PlanDiff

NAME = "diff"
_FIGURES = re.compile(r", MERE \S+ \[[^]]*\], SQNR \S+ dB \[[^]]*\]")  # of evidence
_HELP = "A policy (.yaml) or a plan.json."


def command(
    before: Annotated[str, typer.Argument(metavar="A", help=_HELP, show_default=False)],
    after: Annotated[str, typer.Argument(metavar="B", help=_HELP, show_default=False)],
    as_json: Json = False,
) -> None:
    """Compare two policies, or plans: what runs differently, and how many FLOPs that moves."""
    from loka.plan.planner import read_plan
    from loka.plan.view.diff import diff

    plan = read_plan(after)
    change = diff(read_plan(before), plan)
    if as_json:
        print_json(change)
    else:
        show(change, plan)


def show(change: PlanDiff, plan: Plan) -> None:
    """Print how many sites change, the times before and after, and the changes, sites that change alike together.

    `plan` is the second one, whose sites are named as its rules take them.
    """
    from loka.plan.format import format_share

    before, after = map(format_share, change.share_fp8)
    if change.same:
        print_line(f"Both decide the same: {before} of the training GEMM FLOPs in FP8.")
    else:
        sites = f"{len(_changes(change))} of {len(plan.sites)} sites to change"
        sites += "".join(
            f", {len(names)} to {word}" for word, names in (("add", change.added), ("remove", change.removed)) if names
        )
        moved = before if before == after else f"{before} -> {after}"
        print_line(f"{sites}: {moved} of the training GEMM FLOPs in FP8.")
    _show_total(change)
    measured = tuple(each or "none" for each in change.measurements)
    for label, pair in (
        ("target", change.target),
        ("batch size", change.batch_size),
        ("measurements", measured),
        ("TorchRec's exchanges", change.exchange),
    ):
        if pair[0] != pair[1]:
            print_line(f"{label}: {pair[0]} -> {pair[1]}")
    for each in change.interactions:
        count = f"{each.count[0]} -> {each.count[1]} of them, " if each.count[0] != each.count[1] else ""
        print_line(f"{each.what} in {each.owner}: {count}{each.us[0]} -> {each.us[1]} us")
    for mod in change.mods:
        print_line(f"mod {mod.mod}: {mod.before}; now {mod.after}{_moved(mod)}")
    for line in site_lines(change, plan):
        print_line(line)


def site_lines(change: PlanDiff, plan: Plan) -> list[str]:
    """A line for sites that change alike and one for each change; then the sites that are added and removed.

    `change layers.*.up (3 sites, 24.0 % of the FLOPs): 25.9 -> 16.1 us`
    """
    from loka.plan.format import format_share, grouped, pattern_of, rule_patterns
    from loka.plan.view.table import rule_names

    sites_of, everything = {each.site.name: each.site for each in plan.sites}, rule_names(plan)
    times = {each.site: f": {_pair(each.before, each.after)} us" for each in change.times}
    changes = _changes(change)

    def header(word: str, sites: Sequence[str]) -> str:
        known = [sites_of[each] for each in sites if each in sites_of]
        names = [name for each in known for name in each.rule_names] or sites  # those removed are not in the plan
        more = [f"{len(sites)} sites"] if len(sites) > 1 else []
        more += [f"{format_share(sum(each.share for each in known))} of the FLOPs"] if known else []
        patterns = ", ".join(rule_patterns(names, everything))
        return f"{word} {patterns} ({', '.join(more)})" if more else f"{word} {patterns}"

    lines = []
    for group in grouped(changes, lambda site: (pattern_of(site), _alike(changes[site]), times.get(site, ""))):
        lines.append(header("change", group) + times.get(group[0], ""))
        lines += [f"    {line}" for line in changes[group[0]]]
    for word, sites in (("add", change.added), ("remove", change.removed)):
        lines += [header(word, group) for group in grouped(sites, pattern_of)]
    return lines


def _changes(change: PlanDiff) -> dict[str, list[str]]:
    """The sites that change, each with its changes: `fprop, wgrad: as-is -> e4m3 rowwise`."""
    from loka.plan.format import grouped

    found: dict[str, list[str]] = {site: ["another size"] for site in change.resized}
    for group in grouped(change.gemms, lambda each: (each.site, each.before, each.after, each.evidence)):
        first, gemms = group[0], ", ".join(each.gemm.value for each in group)
        verdicts = _FIGURES.sub("", first.evidence).split(" -> ")
        evidence = f" ({first.evidence})" if len(set(verdicts)) > 1 else ""
        found.setdefault(first.site, []).append(f"{gemms}: {first.before} -> {first.after}{evidence}")
    for region in change.regions:
        before, after = (" ".join(ops) or "none" for ops in (region.before, region.after))
        found.setdefault(region.site, []).append(f"region: {before} -> {after}")
    for gather in change.gathers:
        found.setdefault(gather.site, []).append(f"all-gather of its weight: {gather.before} -> {gather.after}")
    return found


def _alike(lines: Sequence[str]) -> tuple[str, ...]:
    """Changes without the figures of evidence, by which alike sites differ."""
    return tuple(_FIGURES.sub("", line) for line in lines)


def _moved(mod: ModChange) -> str:
    """Names that a mod changes in only one of the plans, if both have the mod."""
    if "-" in (mod.before, mod.after):
        return ""
    more = [f"{word} {', '.join(names)}" for word, names in (("with", mod.added), ("without", mod.removed)) if names]
    return f" ({'; '.join(more)})" if more else ""


def _show_total(change: PlanDiff) -> None:
    """Print the total times if they differ."""
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
