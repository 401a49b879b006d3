"""examples/torcheasyrec in two processes on the CPU, where TorchEasyRec is installed: it learns as without FP8."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import markdown

EXAMPLE = markdown.REPOSITORY / "examples" / "torcheasyrec"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tzrec") is None, reason="TorchEasyRec (tzrec) is not installed"),
]


def run(folder: Path, *command: str) -> str:
    """What a Python command prints in a folder; tzrec sets up the process that imports it, so it has one of its own."""
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(folder: Path, *options: str) -> list[float]:
    shutil.rmtree(folder / "model", ignore_errors=True)
    printed = run(folder, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", "--steps", "31", *options)
    return [float(loss) for loss in re.findall(r"^step +\d+: loss ([\d.]+)$", printed, re.MULTILINE)]


def test_its_own_loop_trains_the_bound_model_as_the_plain_one(tmp_path: Path) -> None:
    folder = tmp_path / "torcheasyrec"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("generated", "__pycache__"))
    assert "8 of 13 sites in FP8" in run(folder, "-m", "loka", "generate", "mmoe.yaml")
    bound, plain = losses(folder), losses(folder, "--plain")
    assert len(bound) == 4
    assert plain[-1] < 1.05 < 1.35 < plain[0]
    assert bound == pytest.approx(plain, abs=0.01)
    assert bound != plain
