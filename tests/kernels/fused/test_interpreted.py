"""All kernels in Triton's interpreter, a family in a process of its own: the interpreter is chosen at import."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.launch import run_interpreted

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="Triton interprets kernels; this platform has none")

LEAST_COMPARED = {  # results, at least
    "aligned": 30,
    "cross": 10,
    "interaction": 30,
    "product": 100,
    "quantized": 2000,
    "recorded": 80,
    "rendered": 900,
    "weights": 30,
    "wide": 120,
}


@pytest.mark.parametrize("family", LEAST_COMPARED)
def test_kernels_read_and_write_what_they_should(family: str, tmp_path: Path) -> None:
    assert run_interpreted(f"{family}_interpreted", tmp_path) >= LEAST_COMPARED[family]
