"""`loka doctor`: what this machine has, and which path FP8 will take on it."""

from __future__ import annotations

import typer

from loka.cli.output import Json, print_json, print_table

NAME = "doctor"


def command(as_json: Json = False) -> None:
    """Report Python, torch, Triton, the devices, the libraries, and which path FP8 takes here."""
    from loka.cli.environment import examine

    items = examine()
    if as_json:
        print_json(items)
    else:
        print_table(
            ("", "status", "found", "note"), [(item.name, item.status, item.found, item.note) for item in items]
        )
    if any(item.status == "problem" for item in items):
        raise typer.Exit(1)
