"""Rendered products in Triton's interpreter, which is right about indexing and masks (see gemm_interpreted.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton interprets kernels; this platform has none")


def test_products_read_and_write_what_they_should(tmp_path):
    program = Path(__file__).parent / "gemm_interpreted.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 250  # results that were compared
