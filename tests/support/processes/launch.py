"""Starting Python in a process of its own that finds both loka and these helpers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def environment(**changes: str) -> dict[str, str]:
    """The variables of this process with the repository first on the path, and with these changes."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **changes}


def run_interpreted(program: str, folder: Path) -> int:
    """Run a program of `tests.support.interpreted` in Triton's interpreter; how many results it compared."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.interpreted.{program}", str(folder)],
        env=environment(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)
