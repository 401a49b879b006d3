"""Parts of interactions, measured on a Hopper GPU."""

from __future__ import annotations

import pytest

from loka.bench.packages import Workshop
from loka.bench.record.clock import GraphClock
from loka.bench.record.record import all_parts, in_order, measure
from loka.bench.record.run_record import compile_ahead, rendered
from loka.kernels.measurements.interaction_forms import parts_of
from loka.kernels.measurements.parts import COMPILED, RENDERED
from tests.support.gpu import ON_HOPPER
from tests.support.plan.recorded_parts import FORMS

pytestmark = [*ON_HOPPER, pytest.mark.timing]


def test_interactions_are_measured_on_a_gpu() -> None:
    parts = [part for form, d in FORMS for kernel in (RENDERED, COMPILED) for part in parts_of(form, 4096, d, kernel)]
    with Workshop() as workshop:
        prepare, clock = all_parts(workshop.kernels(rendered(parts))), GraphClock()
        compile_ahead(parts, workshop.folder, 2, print)
        for part in in_order(parts):
            span, check = measure(part, prepare, clock.time)
            assert check.wrong == "", part
            assert 0.5 < span.us < 2000, part
