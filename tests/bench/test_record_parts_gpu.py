"""The parts of the set that ships, measured on a Hopper GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from loka.bench.record.clock import GraphClock
from loka.bench.record.compiled_kernels import CompiledKernels
from loka.bench.record.gemm_parts import Gemms
from loka.bench.record.grid import grid
from loka.bench.record.interaction_parts import InteractionParts
from loka.bench.record.producer_parts import Producers
from loka.bench.record.record import AllParts, measure
from loka.kernels.measurements.parts import Part, PartKind
from tests.support.gpu import ON_HOPPER
from tests.support.plan.recorded_parts import PARTS, SIZES

pytestmark = [*ON_HOPPER, pytest.mark.timing]


def test_parts_are_measured_on_a_gpu(tmp_path: Path) -> None:
    parts = [*PARTS, *(part for part in grid(("gemm",)) if (part.rows, part.columns, part.contraction) in SIZES)]
    kernels = CompiledKernels(parts, tmp_path)
    bench = AllParts(Gemms(), Producers(kernels.module), InteractionParts(kernels.module))
    clock = GraphClock()
    for part in parts:
        span, check = measure(part, bench, clock)
        assert check.wrong == "", part
        assert 0.5 < span.us < 200, part
        assert span.spread < 0.3, part
    single = bench.prepare(Part(PartKind.GEMM, "as-is", 4096, 4096, 4096, dtype="float32"))
    assert clock.time(single.call, single.arguments).us < 1000  # 2700 us where it is not TF32
