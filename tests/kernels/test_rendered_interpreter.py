"""Rendered kernels in Triton's interpreter, which is right about indexing and masks (see rendered_interpreted.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton interprets kernels; this platform has none")


def test_kernels_read_and_write_what_they_should(tmp_path):
    program = Path(__file__).parent / "rendered_interpreted.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 900  # results of norms that were compared
