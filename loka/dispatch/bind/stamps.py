"""Check on import that a generated package is complete and unchanged."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from loka.dispatch.dispatch_errors import BindError
from loka.errors import Code
from loka.paths import open_plain

MANIFEST = "manifest.json"
_CODE = ("__init__.py", "fused.py", "kernels.py", "modules.py", "triton_kernels.py")  # those that a package may have
EDITED = "LOKA_EDITED_PACKAGES"  # environment variable: "allow" permits importing edited code


def check_stamps(package: str, stamp: str, *others: str) -> None:
    """Raise BindError unless all files of a package are of one generation and its code is unchanged since.

    One generation: `others` and the `stamp` of manifest.json beside the package are all `stamp`. Unchanged: each Python
    file has the sha256 that the manifest lists; LOKA_EDITED_PACKAGES=allow skips this check. Byte code in `__pycache__`
    is not read.

    `package` is the `__name__` of the generated package, which calls this while it is imported. The manifest is
    removed before any other file changes and written last, so an interrupted generation leaves none.
    """
    file = getattr(sys.modules.get(package), "__file__", None)  # not there where its text was executed
    where = str(Path(file).parent) if file else package
    again = f"run loka generate on the policy of {package.rpartition('.')[2]!r} again"
    found, outputs = _manifest(Path(where, MANIFEST)) if file else ("", {})
    if any(other != stamp for other in (*others, found)):
        raise BindError(
            f"{where}: its files are not of one generation (it was cut short, or files were mixed): {again}",
            Code.PACKAGE,
        )
    if os.environ.get(EDITED) == "allow":
        return
    # A file whose hash was taken out of the manifest counts as changed.
    names = {name for name in outputs if name.endswith(".py")} | {name for name in _CODE if Path(where, name).exists()}
    changed = [name for name in sorted(names) if _sha256(Path(where, name)) != outputs.get(name)]
    if changed:
        raise BindError(
            f"{where}: changed since it was generated (edited, or damaged): {', '.join(changed)}: {again}, or, to "
            f"import what you have edited yourself, set {EDITED}=allow in the environment",
            Code.PACKAGE,
        )


def _manifest(path: Path) -> tuple[str, dict[str, Any]]:
    """The stamp and the outputs in a manifest; the stamp is "" if it cannot be read."""
    try:
        with open_plain(path) as file:
            manifest = json.loads(file.read().decode())
    except (OSError, ValueError, RecursionError):
        return "", {}
    fields = manifest if isinstance(manifest, dict) else {}
    stamp, outputs = fields.get("stamp"), fields.get("outputs")
    return (stamp, outputs) if isinstance(stamp, str) and isinstance(outputs, dict) else ("", {})


def _sha256(path: Path) -> str:
    """The sha256 of a file; "" if it cannot be read."""
    try:
        with open_plain(path) as file:
            return hashlib.sha256(file.read()).hexdigest()
    except (OSError, ValueError):
        return ""
