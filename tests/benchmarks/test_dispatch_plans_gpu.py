"""A region under plans that measurements decide, measured on a Hopper GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.dispatch.dispatch_cases import (
    COMPILED,
    DISPATCH,
    FUSED,
)
from benchmarks.dispatch.dispatch_run import run_dispatch
from tests.support.gpu import ON_HOPPER
from tests.support.plan.bound_costs import SHAPE, known

pytestmark = [*ON_HOPPER, pytest.mark.timing]


def test_a_region_is_measured_on_a_gpu(tmp_path: Path) -> None:
    variants = (COMPILED, FUSED, "cublas-precise", "cublas-fast", DISPATCH)
    lines = run_dispatch(tmp_path / "lines.jsonl", known(fp8=0.3, fast=0.8), [SHAPE], variants, print, lambda: False)
    assert {each.variant for each in lines} == set(variants)
    for each in lines:
        assert each.failure == "", each
        assert each.us is not None
        assert 20 < each.us < 2000
        assert each.output_db is not None
        assert each.output_db > (25 if "scaled_mm" in each.runs else 35)
    by_name = {each.variant: each for each in lines}
    assert by_name[DISPATCH].us == by_name["cublas-fast"].us
