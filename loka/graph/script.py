"""Names of what the script that runs defines. Python calls its module `__main__`, a plan by the name of its file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

_MAIN = "__main__"
_NAMES = frozenset({_MAIN, "__mp_main__"})  # the second in processes that multiprocessing has spawned


def in_script(module: str | None) -> bool:
    """True if a module of this name is the script that runs."""
    return module in _NAMES


def script_file() -> Path | None:
    """The absolute path of the script that runs; None in an interactive session or a notebook."""
    file = getattr(sys.modules.get(_MAIN), "__file__", None)
    return Path(os.path.abspath(file)) if file else None


def script_in(planned: Iterable[str]) -> str:
    """The module name under which a plan knows the script that runs: "train", or "package.train".

    Args:
        planned: Qualified names in the plan, such as "package.train.Ranker".

    Returns:
        The first module among them whose name is the end of the script's path; without one, the name of the script's
        file. "" if there is no such file.
    """
    file = script_file()
    if file is None:
        return ""
    path = file.with_suffix("").parts
    for name in planned:
        parts = tuple(name.split("."))
        for end in range(len(parts) - 1, 0, -1):
            if parts[:end] == path[-end:]:
                return ".".join(parts[:end])
    return file.stem
