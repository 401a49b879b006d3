"""Starting Python in a process of its own that finds both loka and these helpers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]


def environment(**changes: str) -> dict[str, str]:
    """The variables of this process with the repository first on the path, and with these changes."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **changes}


def run_interpreted(families: Sequence[str], folder: Path) -> dict[str, int]:
    """Run programs of `tests.support.interpreted` in Triton's interpreter; how many results each compared."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.interpreted", str(folder), *families],
        env=environment(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return {family: int(count) for family, count in (line.split() for line in done.stdout.splitlines())}
