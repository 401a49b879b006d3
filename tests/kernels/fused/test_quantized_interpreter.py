"""Modes of quantization in Triton's interpreter, in a process of its own: the interpreter is chosen at import."""

from __future__ import annotations

import pytest

from tests.support.processes.launch import run_interpreted

pytest.importorskip("triton", reason="Triton interprets kernels; this platform has none")


@pytest.mark.slow
def test_modes_read_and_write_what_they_should(tmp_path):
    assert run_interpreted("quantized_interpreted", tmp_path) > 2000  # results that were compared
