"""`loka doctor`: this machine's versions, devices and libraries, and its FP8 path."""

from __future__ import annotations

from typing import Annotated

import typer

from loka.cli.output import Json, print_json, print_table

NAME = "doctor"


def command(
    policy: Annotated[
        str | None,
        typer.Argument(
            metavar="[POLICY]", help="Also whether what this policy is decided by fits.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Report Python, torch, Triton, devices, libraries, the path FP8 takes here, and measurements."""
    from loka.cli.doctor_items import examine, policy_items, shipped_items, this_device

    here = this_device()
    items = (*examine(), *shipped_items(here))
    if policy is not None:
        items = (*items, *policy_items(policy, here))
    works = not any(item.status == "problem" for item in items)
    if as_json:
        print_json({"works": works, "items": items})
    else:
        print_table(
            ("", "status", "found", "note"), [(item.name, item.status, item.found, item.note) for item in items]
        )
    if not works:
        raise typer.Exit(1)
