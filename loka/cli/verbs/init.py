"""`loka init`: a first policy, drafted from the model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from loka.cli.output import note, write_file
from loka.cli.verbs.schema import schema_text

NAME = "init"


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="The function that returns the model, package.module:name.", show_default=False
        ),
    ],
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="Default: policies/NAME.yaml.", show_default=False)
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(
            metavar="CALLABLE",
            help="The function that returns the inputs for a batch size. Default: example_inputs of model or module.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=2**31 - 1, help="Samples in a step.")] = 4096,
    name: Annotated[
        str | None, typer.Option(help="Of the policy. Default: that of the file.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Draft a first policy from the model."""
    from loka.errors import InputError
    from loka.paths import check_replaceable
    from loka.plan.draft import DraftOptions, check_name, draft_policy, identifier
    from loka.plan.mod_proposals import drafted_from

    if name is None:
        name = identifier(Path(out).stem if out else model.partition(":")[2])
    check_name(name)
    path = Path(out or f"policies/{name}.yaml")
    if out is not None and not out.strip():
        raise InputError("-o is empty; name a file, or leave the option out for policies/NAME.yaml")
    if os.path.exists(path) and not force:
        raise InputError(f"{path}: is there already; choose another with -o, or overwrite it with --force")
    if path.suffix not in (".yaml", ".yml"):
        check_replaceable(path, "a policy", lambda head: b"version:" in head)
    options = DraftOptions(name, model, inputs, batch_size)
    found = drafted_from(model, inputs, batch_size)
    text = draft_policy(options, found.sites, found.mods)
    schema = path.parent / "schema.json"
    write_file(path, text)
    if not schema.exists():
        try:
            write_file(schema, schema_text())
            note(f"wrote {schema}, for your editor")
        except InputError as error:  # the policy is complete without it
            note(f"note: {error}")
    note(f"wrote {path}; next: loka plan {path}")
