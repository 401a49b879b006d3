"""`loka explain`: everything about one site, and the rule behind each of its fields."""

from __future__ import annotations

from typing import Annotated

import typer

from loka.cli.output import Json, PolicyPath, announce, print_json

NAME = "explain"


def command(
    policy: PolicyPath,
    site: Annotated[str, typer.Argument(metavar="SITE", help="A site's name, as `loka plan` prints it.")],
    as_json: Json = False,
) -> None:
    """Explain one site: what it is, what runs and why, the rule that set each field, and its profile."""
    announce(f"planning {policy}")
    from loka.cli.tables.explain_tables import show_site
    from loka.plan.planner import planned
    from loka.plan.view.explain import explain

    made = planned(policy)
    explained = explain(made.plan, site, made.known)
    if as_json:
        print_json(explained.json())
    else:
        show_site(explained)
