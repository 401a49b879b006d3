"""Check on import that a generated package is complete."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from loka.dispatch.dispatch_errors import BindError
from loka.paths import open_plain

MANIFEST = "manifest.json"


def check_stamps(package: str, stamp: str, *others: str) -> None:
    """Raise BindError unless `others` and the `stamp` of manifest.json beside the package are all `stamp`.

    `package` is the `__name__` of the generated package, which calls this while it is imported. The manifest is
    removed before any other file changes and written last, so an interrupted generation leaves none.
    """
    file = getattr(sys.modules[package], "__file__", None)
    manifest = _manifest_stamp(Path(file).with_name(MANIFEST)) if file else ""
    if all(other == stamp for other in (*others, manifest)):
        return
    where = str(Path(file).parent) if file else package
    raise BindError(
        f"{where}: its files are not of one generation (it was cut short, or files were mixed): "
        f"run loka generate on the policy of {package.rpartition('.')[2]!r} again"
    )


def _manifest_stamp(path: Path) -> str:
    """The stamp in a manifest; "" if it cannot be read."""
    try:
        with open_plain(path) as file:
            manifest = json.loads(file.read().decode())
    except (OSError, ValueError):
        return ""
    stamp = manifest.get("stamp") if isinstance(manifest, dict) else None
    return stamp if isinstance(stamp, str) else ""
