"""Rendered kernels in Triton's interpreter, which is right about indexing and masks (see rendered_interpreted.py)."""

from __future__ import annotations

import pytest

from tests.support.processes.launch import run_interpreted

pytest.importorskip("triton", reason="Triton interprets kernels; this platform has none")


@pytest.mark.slow
def test_kernels_read_and_write_what_they_should(tmp_path):
    assert run_interpreted("rendered_interpreted", tmp_path) > 900  # results of norms that were compared
