"""A plan.json on the disk. In a generated package it is compared with the hash that the manifest beside it has."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from loka.errors import InputError
from loka.plan.plan import Plan
from loka.plan.serialize import from_json

MANIFEST, PACKAGE_FORMAT = "manifest.json", "loka.package"


def read_plan_file(name: str) -> Plan:
    """The plan in a file. Raises InputError; also where the file is not the one that its package was generated with."""
    path = Path(name)
    try:
        data = path.read_bytes()
        recorded = _recorded_hash(path)
        if recorded is not None and hashlib.sha256(data).hexdigest() != recorded:
            raise InputError(
                f"{name}: not the plan that {MANIFEST} beside it was generated with (edited, or damaged): run loka "
                "generate again"
            )
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not a text in UTF-8; name a plan.json of `loka generate`") from error
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror or error}); check the path") from error
    return from_json(text, name)


def _recorded_hash(path: Path) -> object:
    """What the manifest beside a file says of it; None where there is no manifest of a package, or it says nothing."""
    try:
        manifest = json.loads(path.with_name(MANIFEST).read_text(encoding="utf-8"))
        return manifest["outputs"].get(path.name) if manifest["format"] == PACKAGE_FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
