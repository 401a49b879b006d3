"""Rendered products in Triton's interpreter, which is right about indexing and masks (see gemm_interpreted.py)."""

from __future__ import annotations

import pytest

from tests.support.processes.launch import run_interpreted

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="Triton interprets kernels; this platform has none")


def test_products_read_and_write_what_they_should(tmp_path):
    assert run_interpreted("gemm_interpreted", tmp_path) > 250  # results that were compared
