"""`loka plan`: the recipe of each GEMM, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from loka.cli.output import Cached, Json, PolicyPath, note, percent, print_json, print_line
from loka.cli.progress import announce_plan
from loka.cli.tables.coverage_lines import coverage_result, print_coverage
from loka.cli.tables.mod_lines import print_mods
from loka.cli.tables.plan_table import COUNT, EVIDENCE, REGION, TIMES, show_interactions, show_rows

if TYPE_CHECKING:
    from loka.plan.plan import Plan
    from loka.policy.policy import Policy

NAME = "plan"
MANY = 60  # sites; with more, those that are alike share a line


def command(
    policy: PolicyPath,
    all_sites: Annotated[bool, typer.Option("--all", help="One line a site, however many there are.")] = False,
    gains: Annotated[
        bool, typer.Option("--gains/--no-gains", help="Plan once more for each mod that changed something, without it.")
    ] = True,
    cached: Cached = True,
    as_json: Json = False,
) -> None:
    """Show what each GEMM will run in, and why."""
    announce_plan(policy)
    from loka.errors import CheckFailedError
    from loka.mods.policy_loader import load_policy
    from loka.plan.evidence import over_budget_message
    from loka.plan.plan_cache import PlanCache
    from loka.plan.planner import planned
    from loka.plan.serialize import to_json

    loaded = load_policy(policy)
    found = planned(loaded, gains=gains, prospects=True, cache=PlanCache.default(cached))
    plan, prospect = found.plan, found.prospect
    synthetic = found.known is not None and found.known.profile.synthetic
    if as_json:
        beside = {"next": next_step(plan, loaded), "notes": found.notes, "prospect": prospect, "synthetic": synthetic}
        beside["tuned_ignored"] = found.ignored
        print_json(_summary(plan) | beside | {"plan": json.loads(to_json(plan))})
    else:
        show(plan, all_sites, found.notes)
        if found.known is not None and synthetic:
            print_line(f"{found.known.name} is of drawn inputs and labels: weaker evidence than training.")
        if prospect is not None:
            print_line(f"{prospect.describe(plan.batch_size)}.")
        following = next_step(plan, loaded)
        if following:
            note(f"next: {following}")
    over = over_budget_message(plan)
    if over:
        raise CheckFailedError(over)


def next_step(plan: Plan, policy: Policy) -> str:
    """The next command where GEMMs wait for a profile, with what it needs first; "" if none does."""
    from loka.plan.evidence import NO_EVIDENCE

    waits = any(gemm.reason == NO_EVIDENCE for site in plan.sites for gemm in site.gemms)
    if plan.profile is not None or not waits:
        return ""
    if policy.train is None:
        fields = "train: {batches: ..., loss: ...}"
        return (
            f"name your batches and loss in {policy.path} ({fields}), then run: loka probe {policy.path}; or, as "
            f"weaker evidence, loka probe {policy.path} --synthetic"
        )
    return f"loka probe {policy.path}"


def show(plan: Plan, all_sites: bool, notes: Sequence[str] = ()) -> None:
    """Print the table, notes, what could not be patched, mods, budgets, coverage, the summary and times."""
    from loka.plan.report.coverage import coverage_of
    from loka.plan.report.plan_rows import group_interactions, group_sites

    grouped = len(plan.called) > MANY and not all_sites
    rows = group_sites(plan, alike=grouped)
    hidden = set() if grouped else {COUNT}
    if not any(site.region for site in plan.sites):
        hidden.add(REGION)
    if plan.profile is None:
        hidden.update(EVIDENCE)
    if all(site.timing is None for site in plan.sites):
        hidden.update(TIMES)
    show_rows(rows, frozenset(hidden))
    show_interactions(group_interactions(plan))
    print_uncalled(plan)
    for each in notes:
        print_line(f"note: {each}")
    print_skipped(plan)
    print_mods(plan)
    if grouped:
        print_line(f"{len(plan.called)} sites in {len(rows)} groups; --all shows each.")
    print_budgets(plan)
    print_ne(plan)
    if any(site.site.calls for site in plan.sites):
        print_coverage(coverage_of(plan))
    print_line(summary_line(plan))
    print_times(plan)
    print_tuned(plan)


def print_budgets(plan: Plan) -> None:
    """Print the budgets of the sites, if there is a profile or measurements."""
    from loka.plan.report.profile_view import budgets

    if plan.profile is None and plan.measurements is None:
        return
    for budget, count in budgets(plan).items():
        limits = f"MERE {budget.mere:g}, SQNR {budget.sqnr_db:g} dB, min_speedup {budget.min_speedup:g}"
        print_line(f"budget of {limits}: {count} site{'s' if count != 1 else ''}")


def print_ne(plan: Plan) -> None:
    """Print the predicted change of NE, if the profile has any."""
    from loka.plan.format import format_ne
    from loka.plan.ne import planned_ne

    found = planned_ne(plan.sites)
    if found is None:
        return
    rest = f"; the forward GEMMs of {len(found.unknown)} more were not measured" if found.unknown else ""
    gemms = "1 GEMM" if found.known == 1 else f"{found.known} GEMMs"
    limit = "" if plan.ne_budget is None else f", budget {plan.ne_budget:g} %"
    print_line(f"predicted change of NE: {format_ne(found.ne_percent)} by {gemms} in FP8{rest}{limit}.")


def print_times(plan: Plan) -> None:
    """Print the total time of sites and interactions and its sources, or that there is none."""
    from loka.plan.totals import format_host, format_time_sources, format_total, total_time

    total = total_time(plan)
    if plan.measurements is None or total is None:
        if plan.measurements is not None:
            print_line(f"{plan.measurements[0]} has no times for what may run here: none decided.")
        lacking = measurements_note(plan)
        if lacking:
            print_line(f"{lacking}.")
        return
    print_line(f"{format_total(total)}, by {plan.measurements[0]} ({format_time_sources(total)}).")
    host = format_host(plan, total)
    if host:
        print_line(f"{host}.")


def print_tuned(plan: Plan) -> None:
    """Print what a measured step said of the plan, if one decided it."""
    from loka.plan.format import describe_tuned

    if plan.tuned is not None:
        print_line(f"{describe_tuned(plan.tuned)} ({plan.tuned.file}: {plan.tuned.choice}).")


def measurements_note(plan: Plan) -> str:
    """That there are no measurements for the plan's target, with what to do; "" if there are, or none are needed."""
    from loka.devices.targets import DEVICES

    reference = DEVICES[plan.target].is_reference
    if plan.measurements is not None or (reference and plan.execution is None):
        return ""
    start = f"execution: {plan.execution.mode.value}: " if plan.execution is not None else ""
    decided = "neither time nor the host decided anything" if start else "time decided nothing"
    advice = "" if reference else "; record them on that device: loka bench kernels --record FILE"
    return f"{start}no measurements for {plan.target.value} ship or are named, so {decided}{advice}"


def print_uncalled(plan: Plan) -> None:
    """Print the linears that no forward calls, which are no sites of the table."""
    from loka.plan.report.plan_rows import group_uncalled

    for row in group_uncalled(plan):
        linears = f"{row.pattern} ({row.count} linears)" if row.count > 1 else row.pattern
        print_line(f"NEVER CALLED {linears}: {row.reason}")


def print_skipped(plan: Plan) -> None:
    """Print a line for each module whose forward could not be rewritten."""
    for skipped in plan.skipped:
        name = f"region {skipped.owner!r}" if skipped.owner else "the model itself"
        share = f" ({percent(skipped.share)} of FLOPs)" if skipped.share else ""
        rest = "" if skipped.share else "; its sites are patched in smaller modules, or one by one"
        print_line(f"NOT PATCHED {name}{share}: {skipped.reason}{rest}")


def summary_line(plan: Plan) -> str:
    """Summary of a plan: the share of the model in FP8."""
    count = sum(site.fp8 for site in plan.sites)
    classes = "class" if len(plan.bindings) == 1 else "classes"
    return (
        f"{plan.name} for {plan.target.value} at batch size {plan.batch_size}: {percent(plan.share_fp8)} of the "
        f"training GEMM FLOPs in FP8, {count} of {len(plan.called)} sites, {len(plan.bindings)} generated {classes}."
    )


def _summary(plan: Plan) -> dict[str, object]:
    from loka.plan.evidence import over_budget
    from loka.plan.ne import planned_ne
    from loka.plan.report.coverage import coverage_of
    from loka.plan.totals import total_time

    return {
        "name": plan.name,
        "target": plan.target.value,
        "batch_size": plan.batch_size,
        "sites": len(plan.called),
        "never_called": [each.site.name for each in plan.sites if not each.site.called],
        "sites_fp8": sum(site.fp8 for site in plan.sites),
        "share_fp8": plan.share_fp8,
        "coverage": coverage_result(coverage_of(plan)),
        "over_budget": over_budget(plan),
        "ne": planned_ne(plan.sites),
        "ne_budget": plan.ne_budget,
        "measurements": plan.measurements,
        "measurements_note": measurements_note(plan),
        "time": total_time(plan),
        "tuned": plan.tuned,
        "skipped": [{"owner": each.owner, "reason": each.reason, "share": each.share} for each in plan.skipped],
    }
