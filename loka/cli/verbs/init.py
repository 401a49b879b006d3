"""`loka init`: a first policy, drafted from the model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from loka.cli.output import Json, announce, note, print_json
from loka.cli.verbs.schema import schema_text
from loka.paths import write_file

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
            help="The function that returns the inputs for a batch size. Default: example_inputs of model or module, "
            "or the first of --batches.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=2**31 - 1, help="Samples in a step.")] = 4096,
    batches: Annotated[
        str | None,
        typer.Option(
            metavar="CALLABLE",
            help="The function of (batch_size, seed) that yields (inputs, target); with --loss, loka probe can train.",
            show_default=False,
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(metavar="CALLABLE", help="The function of (output, target) for --batches.", show_default=False),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Of the policy. Default: that of the file, else of factory or class.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: Json = False,
) -> None:
    """Draft a first policy from the model."""
    announce(f"building {model}, and looking for its GEMMs")
    from loka.errors import InputError
    from loka.plan.draft import (
        DraftOptions,
        check_name,
        checked,
        draft_policy,
        drafted_from,
        identifier,
        policy_name,
    )

    _check_training(batches, loss)
    if name is None and out:
        name = identifier(Path(out).stem)
    if name is not None:
        check_name(name)
    if out is not None and not out.strip():
        raise InputError("-o is empty; name a file, or leave the option out for policies/NAME.yaml")
    path = None if name is None else _free(Path(out or f"policies/{name}.yaml"), force)
    found = drafted_from(model, inputs, batch_size, batches)
    if name is None or path is None:  # named after the class
        name = policy_name(model, found.model_class)
        path = _free(Path(f"policies/{name}.yaml"), force)
    announce("planning the draft")
    options = DraftOptions(name, model, inputs, batch_size, batches, loss)
    found = checked(options, found)
    text = draft_policy(options, found.sites, found.mods, could=found.could)
    schema = path.parent / "schema.json"
    write_file(path, text)
    written = [str(path)]
    if not schema.exists():
        try:
            write_file(schema, schema_text())
            written.append(str(schema))
            note(f"wrote {schema}, for your editor")
        except InputError as error:  # the policy is complete without it
            note(f"note: {error}")
    following = f"loka {'probe' if batches and loss else 'plan'} {path}"
    note(f"wrote {path}; next: {following}")
    if as_json:
        sites = len(found.sites)
        made = {"name": name, "policy": str(path), "written": written, "sites": sites, "could_fp8": found.could}
        print_json(made | {"mods": found.mods, "next": following})


def _check_training(batches: str | None, loss: str | None) -> None:
    """Raise InputError if only one of the training functions is named, or one cannot be found."""
    from loka.errors import InputError
    from loka.model.callables import current_directory_importable, find_callable

    if (batches is None) != (loss is None):
        there, lacking = ("--batches", "--loss") if loss is None else ("--loss", "--batches")
        raise InputError(f"{there} needs {lacking}: loka probe trains with both; name both, or neither")
    with current_directory_importable():
        for option, spec in (("--batches", batches), ("--loss", loss)):
            if spec is not None:
                find_callable(spec, option)


def _free(path: Path, force: bool) -> Path:
    """The path, if a policy may be written there; raises InputError otherwise."""
    from loka.errors import InputError
    from loka.paths import check_replaceable

    if os.path.exists(path) and not force:
        raise InputError(f"{path}: is there already; choose another with -o, or overwrite it with --force")
    if path.suffix not in (".yaml", ".yml"):
        check_replaceable(path, "a policy", lambda head: b"version:" in head)
    return path
