"""A small run of `loka bench kernels` on a Hopper GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from loka.bench import kernel_speed, library_gemms
from loka.bench.kernel_speed import run
from tests.support.gpu import ON_HOPPER

pytestmark = ON_HOPPER


@pytest.mark.timing
def test_rendered_kernels_and_gemms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_speed, "SHAPES", ((256, 512),))
    monkeypatch.setattr(library_gemms, "SHAPES", ((512, 256, 128),))
    report = run((), None, tmp_path, lambda line: None)
    rendered, products = report.sections
    assert [cell.work for cell in rendered.cells] == [case.title for case in kernel_speed.CASES]
    assert [cell.failure for cell in rendered.cells] == [""] * len(kernel_speed.CASES)
    assert all(cell.timing is not None and 0 < cell.timing.median_us < 1000 for cell in rendered.cells)
    for cell in rendered.cells:
        assert cell.errors is not None
        assert cell.errors.output is not None
        assert cell.errors.output > 35, cell
    for cell in products.cells:
        if cell.variant.startswith("fbgemm") and report.environment.fbgemm is None:
            assert "FBGEMM GenAI is not installed" in cell.failure
            continue
        assert cell.failure == ""
        assert cell.errors is not None
        assert cell.errors.output is not None
        assert cell.errors.output > 25
