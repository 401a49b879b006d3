"""The source files loaded in this process, to tell later whether one has changed.

Files of Python and torch are left to their versions. Those of installed packages are known by size and time of change,
all others by content.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from functools import cache

_INSTALLED = tuple(
    os.path.realpath(path) + os.sep for path in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
)
_STARTED = time.time_ns()  # a file that was changed later may have been loaded as it was before
# What started the process, not what a policy names; and a module that torch.distributed writes in each process.
_LEFT_OUT = frozenset(("__main__", "__mp_main__", "_remote_module_non_scriptable"))
_PYTHON = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep


def loaded_sources() -> dict[str, tuple[str, str]] | None:
    """The file of each loaded module, and the file's state; None if one has changed since this process loaded LoKA."""
    found: dict[str, tuple[str, str]] = {}
    for name, path in _files():
        state = _state(path)
        if state is None or os.stat(path).st_mtime_ns > _STARTED:
            return None
        found[name] = (path, state)
    return found


def unchanged(sources: Mapping[str, tuple[str, str]]) -> bool:
    """True if every file is as it was, and no module is now loaded from another file."""
    loaded = dict(_files())
    return all(loaded.get(name, path) == path and _state(path) == state for name, (path, state) in sources.items())


def _files() -> Iterator[tuple[str, str]]:
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name in _LEFT_OUT or name.partition(".")[0] == "torch" or not isinstance(path, str):
            continue
        if not _is_pythons(path):
            yield name, os.path.abspath(path)


@cache
def _is_pythons(path: str) -> bool:
    real = os.path.realpath(path)
    return real.startswith(_PYTHON) and not real.startswith(_INSTALLED)


def _state(path: str) -> str | None:
    """Text that changes with the file; None where it cannot be read."""
    try:
        if path.startswith(_INSTALLED):
            about = os.stat(path)
            return f"{about.st_size} {about.st_mtime_ns}"
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
