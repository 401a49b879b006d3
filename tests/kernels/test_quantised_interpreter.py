"""Modes of quantisation in Triton's interpreter, in a process of its own: the interpreter is chosen at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton interprets kernels; this platform has none")


def test_modes_read_and_write_what_they_should(tmp_path):
    program = Path(__file__).parent / "quantised_interpreted.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 2000  # results that were compared
