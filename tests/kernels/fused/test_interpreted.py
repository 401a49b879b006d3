"""All kernels in Triton's interpreter, which is chosen when Triton is imported: in another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.launch import run_interpreted

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="Triton interprets kernels; this platform has none")

LEAST_COMPARED = {  # results, at least
    "aligned": 30,
    "batch_norm": 40,
    "interaction": 45,
    "product": 100,
    "quantized": 300,
    "recorded": 100,
    "rendered": 250,
    "weights": 30,
    "wide": 70,
}


def test_kernels_read_and_write_what_they_should(tmp_path: Path) -> None:
    compared = run_interpreted(list(LEAST_COMPARED), tmp_path)
    assert compared.keys() == LEAST_COMPARED.keys()
    assert [family for family, least in LEAST_COMPARED.items() if compared[family] < least] == []
