"""The parts of the set that ships, measured on a Hopper GPU."""

from __future__ import annotations

import pytest

from loka.bench.packages import Workshop
from loka.bench.record.clock import GraphClock
from loka.bench.record.grid import grid
from loka.bench.record.record import all_parts, measure
from loka.bench.record.run_record import rendered
from loka.kernels.measurements.parts import Part, PartKind
from tests.support.gpu import ON_HOPPER
from tests.support.plan.recorded_parts import PARTS, SIZES

pytestmark = [*ON_HOPPER, pytest.mark.timing]


def test_parts_are_measured_on_a_gpu() -> None:
    parts = [*PARTS, *(part for part in grid(("gemm",)) if (part.rows, part.columns, part.contraction) in SIZES)]
    with Workshop() as workshop:
        prepare, clock = all_parts(workshop.kernels(rendered(parts))), GraphClock()
        for part in parts:
            span, check = measure(part, prepare, clock.time)
            assert check.wrong == "", part
            assert 0.5 < span.us < 200, part
            assert span.spread < 0.3, part
        single = prepare(Part(PartKind.GEMM, "as-is", 4096, 4096, 4096, dtype="float32"))
        assert clock.time(single.call, single.arguments).us < 1000  # 2700 us where it is not TF32
