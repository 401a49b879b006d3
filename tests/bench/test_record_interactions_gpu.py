"""Parts of interactions, measured on a Hopper GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from loka.bench.record.clock import GraphClock
from loka.bench.record.compiled_kernels import CompiledKernels
from loka.bench.record.gemm_parts import Gemms
from loka.bench.record.interaction_parts import InteractionParts
from loka.bench.record.producer_parts import Producers
from loka.bench.record.record import AllParts, in_order, measure
from loka.kernels.measurements.interaction_forms import parts_of
from loka.kernels.measurements.parts import COMPILED, RENDERED
from tests.support.gpu import ON_HOPPER
from tests.support.plan.recorded_parts import FORMS

pytestmark = [*ON_HOPPER, pytest.mark.timing]


def test_interactions_are_measured_on_a_gpu(tmp_path: Path) -> None:
    forms = (FORMS[0], FORMS[2], FORMS[5])
    parts = [part for form, d in forms for kernel in (RENDERED, COMPILED) for part in parts_of(form, 4096, d, kernel)]
    kernels = CompiledKernels(parts, tmp_path)
    kernels.compile(2, print)
    bench = AllParts(Gemms(), Producers(kernels.module), InteractionParts(kernels.module))
    clock = GraphClock()
    for part in in_order(parts):
        span, check = measure(part, bench, clock)
        assert check.wrong == "", part
        assert 0.5 < span.us < 2000, part
