"""Products whose rows are not aligned, in the model's dtype: torch.compile pads those that take long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loka.devices.spec import Execution
from loka.devices.targets import DEVICES
from loka.kernels.measurements.lookup import Measurements
from loka.kernels.measurements.part_bounds import is_aligned, padded, padding_us
from loka.kernels.measurements.parts import Part, PartKind, TimeSource
from loka.numerics.enums import Compute, Fuse
from loka.plan.decide import Situation
from loka.plan.resolve import resolve
from loka.plan.select.perf_model import PerfModel
from loka.policy.policy import ExecutionSpec
from tests.support.plan.plan_costs import SAFE_CHAIN, SCALED_MM, MadeUp

H200 = "h200"
LONG = Part(PartKind.GEMM, "as-is", 65536, 1024, 479)


def shipped() -> Measurements:
    measurements = Measurements.shipped(H200)
    assert measurements is not None
    return measurements


# Of (65536, 479) -> 1024: fprop, dgrad and wgrad under torch.compile on an H200 (docs/results/LOG.md, "products that
# torch.compile pads"); eager cuBLAS takes about 500 us for each.
@pytest.mark.parametrize(
    ("sizes", "us"), [((65536, 1024, 479), 150), ((65536, 479, 1024), 100), ((1024, 479, 65536), 130)]
)
def test_a_long_product_takes_as_long_as_padded(sizes: tuple[int, int, int], us: float) -> None:
    part = Part(PartKind.GEMM, "as-is", *sizes)
    made = PerfModel(shipped(), DEVICES[H200]).part(part)
    assert made is not None
    assert made.us == pytest.approx(us, rel=0.06)
    assert made.source is TimeSource.ESTIMATED


# In a training step under torch.compile on an H200 (the same file, "unaligned products in a step"), copies included.
@pytest.mark.parametrize(
    ("sizes", "us"),
    [
        ((8192, 1365, 512), 23),  # dgrad of (8192, 1365) -> 512; eager 90
        ((512, 1365, 8192), 37),  # its wgrad; eager 110
        ((16384, 479, 1024), 26),
        ((1024, 479, 16384), 46),
        ((16384, 1024, 479), 134),  # fprop, which it left
    ],
)
def test_in_a_step_products_whose_columns_alone_are_not_aligned_are_padded_sooner(
    sizes: tuple[int, int, int], us: float
) -> None:
    made = PerfModel(shipped(), DEVICES[H200]).part(Part(PartKind.GEMM, "as-is", *sizes))
    assert made is not None
    assert made.us == pytest.approx(us, rel=0.1)


@pytest.mark.parametrize(
    ("part", "mode"),
    [
        (LONG, Execution.EAGER),  # nothing pads it
        (replace(LONG, rows=8192), None),  # 69 us, which torch.compile leaves as it is
        (replace(LONG, contraction=480), None),  # aligned
        (replace(LONG, kernel=SCALED_MM, recipe="e4m3 rowwise, e4m3 rowwise, precise"), None),  # pads by itself
    ],
    ids=["eager", "short", "aligned", "FP8"],
)
def test_others_take_their_own_time(part: Part, mode: Execution | None) -> None:
    measurements = shipped()
    made, own = PerfModel(measurements, DEVICES[H200], mode).part(part), measurements.time(part)
    assert made is not None
    assert own is not None
    assert made.us == own.us


def test_a_padded_form_that_is_unknown_or_no_faster_changes_nothing() -> None:
    for factor in (lambda part: None if is_aligned(part) else 100.0, lambda part: 200.0 if is_aligned(part) else 100.0):
        costs = MadeUp(factor=factor)
        made, own = PerfModel(costs).part(LONG), costs.time(LONG)
        assert made is not None
        assert own is not None
        assert made.us == own.us


def test_copies_are_of_the_operands_that_are_not_aligned() -> None:
    wide = replace(LONG, rows=1 << 20, columns=1 << 20)
    both, second = padding_us(wide), padding_us(replace(wide, columns=(1 << 20) - 1, contraction=480))
    assert padded(wide) == replace(wide, contraction=480)
    assert second == pytest.approx(both / 2, rel=0.01)
    assert padding_us(replace(wide, contraction=480)) == 0
    assert padded(replace(LONG, dtype="float32", contraction=482)).contraction == 484


def test_plans_price_them_by_how_the_model_runs(make_site, chain_settings, make_known) -> None:
    site = make_site("top", k=479, n=1024)
    costs = MadeUp(factor=lambda part: 1.0 if part.recipe or is_aligned(part) else 20.0)

    def as_is(mode: Execution | None) -> float:
        execution = None if mode is None else ExecutionSpec(mode, 0.0, 0.0)
        known = make_known({"top": SAFE_CHAIN})
        situation = Situation("h100", 65536, known=known, costs=costs, execution=execution)
        (plan,) = resolve([site], [chain_settings(Compute.AUTO, fuse=Fuse.AUTO)], situation, {})
        assert plan.timing is not None
        return plan.timing.as_is.us

    assert as_is(Execution.REDUCE_OVERHEAD) == as_is(None) < as_is(Execution.EAGER) / 3
