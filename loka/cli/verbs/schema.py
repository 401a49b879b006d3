"""`loka schema`: the JSON Schema of the policy language, for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from loka.cli.output import Json, note, print_json
from loka.paths import check_replaceable, write_file

NAME = "schema"


def command(
    out: Annotated[str | None, typer.Option("--out", "-o", metavar="FILE", help="Write it to a file instead.")] = None,
    as_json: Json = False,
) -> None:
    """Print the JSON Schema of the policy language."""
    text = schema_text()
    if out is not None:
        start = text[: text.index(",")].encode()
        check_replaceable(out, "a JSON Schema of policies", lambda head: head.startswith(start))
        write_file(Path(out), text)
        note(f"wrote {out}")
    if out is None:
        print_json(json.loads(text)) if as_json else print(text, end="")
    elif as_json:
        print_json({"written": out})


def schema_text() -> str:
    """The schema as text."""
    from loka.mods.mod_settings import MOD_SCHEMAS
    from loka.policy.policy_schema import json_schema

    return json.dumps(json_schema(MOD_SCHEMAS), indent=2) + "\n"
