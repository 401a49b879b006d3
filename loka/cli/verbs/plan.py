"""`loka plan`: the recipe of each GEMM, and why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from loka.cli.output import Json, PolicyPath, announce, note, print_json, print_line
from loka.errors import Code

if TYPE_CHECKING:
    from loka.plan.plan import Plan
    from loka.plan.planner import Planned
    from loka.policy.policy import Policy

NAME = "plan"


def command(
    policy: PolicyPath,
    all_sites: Annotated[bool, typer.Option("--all", help="One line a site, however many there are.")] = False,
    gains: Annotated[
        bool,
        typer.Option(
            "--gains/--no-gains", help="Plan once more without each mod that changes something, to say what it gains."
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Show what each GEMM will run in, and why."""
    announce(f"planning {policy}")
    from loka.cli.tables.plan_table import show_plan
    from loka.errors import CheckFailedError
    from loka.mods.policy_loader import load_policy
    from loka.plan.evidence import over_budget_message
    from loka.plan.planner import planned
    from loka.plan.serialize import to_json

    loaded = load_policy(policy)
    found = planned(loaded, gains=gains, prospects=True, progress=announce)
    plan, prospect = found.plan, found.prospect
    synthetic = found.known is not None and found.known.profile.synthetic
    if as_json:
        beside = {"next": next_step(plan, loaded), "notes": found.notes, "prospect": prospect, "synthetic": synthetic}
        beside["tuned_ignored"] = found.ignored
        print_json(_summary(found) | beside | {"plan": json.loads(to_json(plan))})
    else:
        show_plan(plan, all_sites, found.notes, prospect)
        if found.known is not None and synthetic:
            print_line(f"{found.known.name} is of drawn inputs and labels: weaker evidence than training.")
        following = next_step(plan, loaded)
        if following:
            note(f"next: {following}")
    over = over_budget_message(plan)
    if over:
        raise CheckFailedError(over, Code.OVER_BUDGET)


def next_step(plan: Plan, policy: Policy) -> str:
    """The next command: where GEMMs wait for a profile, what it needs; else `generate`, if it would change anything.

    "" for a plan over its budget: what to do about it is another message.
    """
    from loka.plan.evidence import over_budget_message, waits_for_evidence

    waits = any(waits_for_evidence(site.gemms) for site in plan.sites)
    if plan.profile is not None or not waits:
        changes = (plan.bindings or plan.adaptations) and not over_budget_message(plan)
        return f"loka generate {policy.path}" if changes else ""
    if policy.train is None:
        fields = "train: {batches: ..., loss: ...}"
        return (
            f"name your batches and loss in {policy.path} ({fields}), then run: loka probe {policy.path}; or, as "
            f"weaker evidence, loka probe {policy.path} --synthetic"
        )
    return f"loka probe {policy.path}"


def _summary(found: Planned) -> dict[str, object]:
    from loka.plan.evidence import over_budget
    from loka.plan.ne import planned_ne
    from loka.plan.totals import total_time
    from loka.plan.view.coverage import coverage_of
    from loka.plan.view.verdict import measurements_note, verdict

    plan = found.plan
    return {
        "name": plan.name,
        "verdict": verdict(plan),
        "target": plan.target,
        "batch_size": plan.batch_size,
        "sites": len(plan.called),
        "never_called": [each.site.name for each in plan.sites if not each.site.called],
        "sites_fp8": sum(site.fp8 for site in plan.sites),
        "share_fp8": plan.share_fp8,
        "coverage": coverage_of(plan),
        "over_budget": over_budget(plan),
        "ne": planned_ne(plan.sites),
        "ne_budget": plan.ne_budget,
        "measurements": plan.measurements,
        "measurements_note": measurements_note(plan),
        "time": total_time(plan),
        "tuned": plan.tuned,
        "skipped": [{"owner": each.owner, "reason": each.reason, "share": each.share} for each in plan.skipped],
    }
