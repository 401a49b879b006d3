"""Reads the plan.json of a generated package, or another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from loka.errors import InputError
from loka.paths import open_plain
from loka.plan.plan import Plan
from loka.plan.serialize import from_json

_MANIFEST, _PACKAGE_FORMAT = "manifest.json", "loka.package"


def plan_in(name: str) -> Plan:
    """The plan in a file. Raises InputError, also if a file in a generated package has changed since."""
    path = Path(name)
    try:
        with open_plain(path) as file:
            data = file.read()
        recorded = _recorded_hash(path)
        if recorded is not None and hashlib.sha256(data).hexdigest() != recorded:
            raise InputError(
                f"{name}: changed since it was generated with its package (edited, or damaged): run loka generate again"
            )
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not a text in UTF-8; name a plan.json of `loka generate`") from error
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror or error}); check the path") from error
    return from_json(text, name)


def _recorded_hash(path: Path) -> object:
    """The hash of a file in the manifest beside it; None without a manifest of a package, or if it has none."""
    try:
        with open_plain(path.with_name(_MANIFEST)) as file:
            manifest = json.loads(file.read().decode())
        return manifest["outputs"].get(path.name) if manifest["format"] == _PACKAGE_FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
