"""`loka validate`: check that a policy is well formed, its callables exist and its patterns match."""

from __future__ import annotations

from typing import Annotated

import typer

from loka.cli.output import Json, PolicyPath, announce, note, print_json, print_line

NAME = "validate"


def command(
    policy: PolicyPath,
    no_model: Annotated[
        bool, typer.Option("--no-model", help="The language alone: build no model, call nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check a policy: its language, its callables, and that every pattern matches a site."""
    if not no_model:
        announce(f"planning {policy}")
    from loka.mods.policy_loader import load_policy

    loaded = load_policy(policy)
    result: dict[str, object] = {
        "name": loaded.name,
        "rules": len(loaded.rules) - 1,
        "sites": None,
    }  # the first rule is the defaults
    text = f"{policy}: fine"
    if not no_model:
        from loka.bench.quality.training_job import job_of
        from loka.plan.evidence import over_budget_message
        from loka.plan.planner import planned

        plan = planned(policy).plan
        if loaded.train is not None:
            job_of(loaded, None, "cpu", tested=loaded.train.test is not None)
        sites, before = len(plan.called), sum(max(1, len(each.site.members)) for each in plan.called)
        result["sites"] = sites
        text += f", {sites} sites" if sites else ", but the model has no GEMM: nothing of it can run in FP8"
        text += f" ({before} before mods made one of several)" if before != sites else ""
        over = over_budget_message(plan)
        if over:
            note(f"warning: {over}")
    if as_json:
        print_json(result)
    else:
        print_line(text)
