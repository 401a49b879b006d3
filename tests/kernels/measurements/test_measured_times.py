"""Looking parts up: exactly, between measured neighbours, and beyond them."""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka.errors import InputError
from loka.kernels.measurements.lookup import DRIFT, HELD_OUT, Measurements
from loka.kernels.measurements.part_bounds import bound_us, is_aligned
from loka.kernels.measurements.parts import Part, PartKind, TimeSource
from tests.support.plan.measured_cases import (
    FP8,
    HOPPER,
    SIZES,
    gemm,
    grid,
    made_up_us,
    measured,
    measurement,
    passes,
    quantize,
)

MEASURED = measured()
inside = st.integers(SIZES[0] // 16, SIZES[-1] // 16).map(lambda size: 16 * size)


def corners(size: int, sizes: tuple[int, ...] = SIZES) -> tuple[int, int]:
    """The measured sizes about one."""
    return max(s for s in sizes if s <= size), min(s for s in sizes if s >= size)


@pytest.mark.parametrize("each", [*grid(), *passes()], ids=lambda each: str(each.part))
def test_what_was_measured_is_answered_exactly(each):
    found = MEASURED.time(each.part)
    assert (found.us, found.source) == (pytest.approx(each.us, rel=1e-5), TimeSource.MEASURED)
    assert found.spread == math.hypot(0.01, DRIFT)


@pytest.mark.slow
@given(inside, inside, inside)
def test_a_product_between_neighbours_takes_no_less_and_no_more_than_they(rows, columns, contraction):
    found = MEASURED.time(gemm(rows, columns, contraction))
    around = [
        MEASURED.time(gemm(r, c, q)).us for r in corners(rows) for c in corners(columns) for q in corners(contraction)
    ]
    assert min(around) <= found.us <= max(around)
    assert found.source is (TimeSource.MEASURED if len(set(around)) == 1 else TimeSource.INTERPOLATED)


@given(inside, inside, inside, st.sampled_from(["rows", "columns", "contraction"]), st.integers(1, 200))
def test_where_measured_times_grow_interpolated_ones_fall_by_less_than_looking_up_is_off(
    rows, columns, contraction, axis, more
):
    """Multiples of a bound that bends need not grow at every step: up to 0.9 % was seen over 60,000 pairs."""
    part = gemm(rows, columns, contraction)
    larger = replace(part, **{axis: min(getattr(part, axis) + 16 * more, SIZES[-1])})
    assert MEASURED.time(larger).us >= MEASURED.time(part).us * (1 - HELD_OUT)


@given(st.integers(512, 8192), inside)
def test_a_pass_between_neighbours_goes_by_bytes(rows, width):
    found = MEASURED.time(quantize(rows, width))
    assert found.us == pytest.approx(made_up_us(quantize(rows, width)), rel=0.02)
    assert found.source is not TimeSource.ESTIMATED


def test_halfway_in_the_logarithms_the_multiple_of_the_bound_is_the_geometric_mean():
    part = gemm(512, 256, 1024)
    found = MEASURED.time(part)
    ends = [gemm(rows, 256, 1024) for rows in (256, 1024)]
    multiples = [MEASURED.time(end).us / bound_us(end) for end in ends]
    assert found.us / bound_us(part) == pytest.approx(math.sqrt(multiples[0] * multiples[1]))
    assert found.source is TimeSource.INTERPOLATED


def test_flat_times_stay_flat_however_the_bound_bends():
    flat = Measurements.of([measurement(gemm(rows, 512, 512), us=5.0) for rows in (2048, 8192)], HOPPER)
    assert flat.time(gemm(4096, 512, 512)).us == 5.0


def test_the_spread_is_the_largest_of_the_neighbours_and_how_far_looking_up_is_off():
    noisy = replace(measurement(gemm(512, 256, 256)), spread=0.2)
    found = Measurements.of([*grid(), noisy], HOPPER)
    assert found.time(gemm(400, 256, 256)).spread == math.hypot(0.2, HELD_OUT)
    assert found.time(gemm(200, 256, 256)).spread == math.hypot(0.01, HELD_OUT)


@pytest.mark.parametrize(
    ("part", "nearest"),
    [
        (gemm(16384, 4096, 4096), gemm(4096, 4096, 4096)),
        (gemm(16, 64, 64), gemm(64, 64, 64)),
        (gemm(64, 8192, 32), gemm(64, 4096, 64)),
        (quantize(65536, 1024), quantize(8192, 1024)),
    ],
)
def test_outside_the_time_goes_by_bytes_and_flops(part, nearest):
    found = MEASURED.time(part)
    assert found.source is TimeSource.EXTRAPOLATED
    assert found.us == pytest.approx(MEASURED.time(nearest).us * bound_us(part) / bound_us(nearest), rel=1e-5)


@given(st.integers(1, 1 << 17), st.integers(1, 1 << 13), st.integers(1, 1 << 13))
def test_there_is_a_time_for_every_size_of_a_measured_kind(rows, columns, contraction):
    found = MEASURED.time(gemm(rows, columns, contraction))
    assert 0 < found.us < math.inf
    other = MEASURED.time(quantize(rows, columns))
    assert 0 < other.us < math.inf


@pytest.mark.parametrize(
    "change", [{"kernel": "fbgemm.rowwise"}, {"recipe": ""}, {"dtype": "float16"}, {"around": "silu"}]
)
def test_another_kind_has_no_time(change):
    assert MEASURED.time(replace(gemm(256, 256, 256), **change)) is None
    assert MEASURED.error(replace(gemm(256, 256, 256), **change)) is None
    assert MEASURED.time(Part(PartKind.REQUANTIZE_TRANSPOSE, "rendered", 2048, 1024, recipe="e4m3 rowwise")) is None


def test_a_hole_in_the_grid_is_bridged_where_neighbours_are_near():
    kept = [each for each in grid((64, 128, 256, 512)) if each.part != gemm(128, 128, 128)]
    found = Measurements.of(kept, HOPPER).time(gemm(128, 128, 128))
    assert found.source is TimeSource.INTERPOLATED
    assert made_up_us(gemm(64, 128, 128)) <= found.us <= made_up_us(gemm(256, 128, 128))


def test_a_gap_that_is_too_wide_is_not_bridged():
    far = [measurement(gemm(rows, 256, 256)) for rows in (64, 8192)]
    assert Measurements.of(far, HOPPER).time(gemm(1024, 256, 256)).source is TimeSource.EXTRAPOLATED


def test_a_size_measured_alone_spoils_no_other():
    plain = Measurements.of(grid(), HOPPER)
    beside = Measurements.of([*grid(), measurement(gemm(2048, 3456, 512))], HOPPER)
    for part in (gemm(2048, 2048, 512), gemm(4096, 3472, 1024), gemm(2000, 64, 64)):
        assert beside.time(part) == plain.time(part)


def test_sizes_off_the_grain_of_memory_do_not_speak_for_aligned_ones():
    slow = [measurement(gemm(rows, 256, 479), us=500.0) for rows in (64, 256, 1024)]
    found = Measurements.of([*grid(), *slow], HOPPER)
    assert found.time(gemm(256, 256, 480)) == MEASURED.time(gemm(256, 256, 480))
    assert found.time(gemm(512, 256, 479)).us == pytest.approx(500.0)
    assert found.time(gemm(512, 256, 479)).source is TimeSource.INTERPOLATED


@pytest.mark.parametrize(
    ("part", "aligned"),
    [
        (gemm(63, 64, 480), True),
        (gemm(64, 64, 488), False),
        (gemm(64, 24, 64), False),
        (gemm(64, 64, 488, "as-is", ""), True),
        (gemm(64, 24, 64, "as-is", ""), True),
        (gemm(64, 64, 484, "as-is", ""), False),
        (replace(gemm(64, 64, 484, "as-is", ""), dtype="float32"), True),
        (quantize(64, 24), True),
        (quantize(64, 13), False),
    ],
)
def test_the_grain_of_memory_is_16_bytes(part, aligned):
    assert is_aligned(part) == aligned


def test_where_only_aligned_sizes_were_measured_others_are_extrapolated():
    assert MEASURED.time(gemm(256, 256, 479)).source is TimeSource.EXTRAPOLATED


def test_beyond_the_unaligned_sizes_an_aligned_time_is_taken_as_often_as_the_nearest_one_takes_it():
    """Those of 479 are slow, and say little of 13."""
    unaligned = [measurement(gemm(rows, 256, 13), us=2 * made_up_us(gemm(rows, 256, 64))) for rows in (256, 4096)]
    unaligned += [measurement(gemm(rows, 1024, 479), us=500.0) for rows in (256, 4096)]
    found = measured(*unaligned).time(gemm(256, 1024, 6))
    assert found.source is TimeSource.EXTRAPOLATED
    assert found.us == pytest.approx(2 * MEASURED.time(gemm(256, 1024, 6)).us, rel=0.1)


@pytest.mark.parametrize("target", ["h100", "h200"])
@pytest.mark.parametrize("m", [8192, 16384, 65536])
def test_a_gate_takes_no_longer_than_an_expert_over_the_same_features(target, m):
    """1344 -> 6 and 1344 -> 1024: fprop, dgrad and wgrad in BF16, by what ships."""
    shipped = Measurements.shipped(target)

    def times(n):
        parts = (gemm(*sizes, "as-is", "") for sizes in ((m, n, 1344), (m, 1344, n), (n, 1344, m)))
        return [shipped.time(each) for each in parts]

    assert {each.source for each in times(6)} == {TimeSource.EXTRAPOLATED}
    assert all(gate.us < expert.us for gate, expert in zip(times(6), times(1024), strict=True))
    narrow = [[each.us for each in times(n)] for n in (8, 16, 32, 64, 128)]
    for less, more in itertools.pairwise(narrow):
        assert all(one <= other for one, other in zip(less, more, strict=True))


def test_a_wrong_kernel_has_no_time_there_and_next_to_it():
    part = gemm(256, 1024, 1024)
    wrong = measurement(part, us=0.0, wrong="MERE inf", mere=math.inf)
    found = Measurements.of([*(each for each in grid() if each.part != part), wrong], HOPPER)
    assert found.time(part) is None
    assert found.wrong_reason(part) == "MERE inf"
    near = gemm(272, 1024, 1040)
    assert found.time(near) is None
    assert found.wrong_reason(near) == "MERE inf (at 256 x 1024 x 1024, the nearest measured)"
    far = gemm(900, 1024, 1024)
    assert found.wrong_reason(far) == ""
    assert found.time(far).source is TimeSource.INTERPOLATED


def test_a_kernel_that_is_wrong_everywhere_has_no_time_and_no_error():
    wrong = [measurement(gemm(size, size, size), wrong="corrupt") for size in SIZES]
    found = Measurements.of(wrong, HOPPER)
    assert found.time(gemm(100, 100, 100)) is None
    assert found.error(gemm(100, 100, 100)) is None
    assert "corrupt" in found.wrong_reason(gemm(100, 100, 100))


def test_a_wrong_unaligned_size_is_no_reason_against_an_aligned_one():
    found = measured(measurement(gemm(1024, 1024, 1023), wrong="corrupt"))
    assert found.wrong_reason(gemm(1024, 1024, 1008)) == ""
    assert found.time(gemm(1024, 1024, 1008)).source is TimeSource.INTERPOLATED


def test_errors_are_those_of_the_nearest_measured_part():
    found = measured(measurement(gemm(1024, 1024, 128), mere=0.5))
    assert found.error(gemm(1024, 1024, 128)) == (0.5, 31.5)
    assert found.error(gemm(1000, 1024, 144)) == (0.5, 31.5)
    assert found.error(gemm(1024, 1024, 1000)) == (0.026, 31.5)
    assert found.error(quantize(2048, 256)) is None


points = st.tuples(*[st.sampled_from([64, 96, 128, 256, 512, 2048])] * 3)


@pytest.mark.slow
@given(st.sets(points, min_size=1, max_size=12), points, st.tuples(inside, inside, inside))
def test_the_nearest_is_the_nearest(sizes, other, asked):
    found = Measurements.of([measurement(gemm(*each), mere=index) for index, each in enumerate(sorted(sizes))], HOPPER)
    for wanted in (other, asked):
        best = min(math.dist(list(map(math.log, each)), list(map(math.log, wanted))) for each in sizes)
        index, _ = found.error(gemm(*wanted))
        nearest = sorted(sizes)[int(index)]
        assert math.dist(list(map(math.log, nearest)), list(map(math.log, wanted))) == pytest.approx(best)


def test_of_two_that_are_equally_near_the_one_below_is_the_nearest():
    below, above = (measurement(gemm(256, columns, 256), mere=columns / 1024) for columns in (128, 512))
    assert Measurements.of([above, below], HOPPER).error(gemm(256, 256, 256)) == (0.125, 31.5)


@pytest.mark.slow
@given(st.permutations([*grid((64, 256, 1024)), *passes((64, 256))]))
def test_the_order_of_measuring_changes_nothing(shuffled):
    one, other = (
        Measurements.of(shuffled, HOPPER),
        Measurements.of([*grid((64, 256, 1024)), *passes((64, 256))], HOPPER),
    )
    assert one.sha256 == other.sha256
    assert one.time(gemm(100, 320, 640)) == other.time(gemm(100, 320, 640))


def test_scaled_times_scale_what_is_looked_up():
    doubled = Measurements.of([replace(each, us=2 * each.us) for each in (*grid(), *passes())], HOPPER)
    for part in (gemm(100, 320, 640), gemm(9000, 320, 640), quantize(3000, 700)):
        assert doubled.time(part).us == pytest.approx(2 * MEASURED.time(part).us, rel=1e-4)


@pytest.mark.parametrize(
    "change",
    [{"us": 0.0}, {"us": -1.0}, {"us": math.nan}, {"us": math.inf}, {"spread": -0.1}, {"spread": math.nan},
     {"runs": -1}, {"mere": math.nan}, {"part": gemm(0, 16, 16)}, {"part": replace(quantize(16, 16), contraction=4)}],
)  # fmt: skip
def test_figures_that_make_no_sense_are_refused(change):
    with pytest.raises(InputError, match="measurement of"):
        Measurements.of([replace(measurement(gemm(64, 64, 64)), **change)], HOPPER)


@pytest.mark.timing
def test_thirty_thousand_look_ups_take_no_time_to_speak_of():
    sizes = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    several = [each for kernel in ("torch.scaled_mm", "fbgemm.rowwise") for each in grid(sizes, kernel)]
    found = Measurements.of([*several, *passes(sizes)], HOPPER)
    drawn = random.Random(0)
    parts = [
        Part(PartKind.GEMM, "torch.scaled_mm", *(16 * drawn.randint(2, 600) for _ in range(3)), recipe=FP8)
        for _ in range(30_000)
    ]
    start = time.process_time()
    for part in parts:
        found.time(part)
        found.wrong_reason(part)
    assert time.process_time() - start < 3.0  # 0.6 s on a quiet core, none of the parts asked for twice
    start = time.process_time()
    for part in parts:
        found.time(part)
    assert time.process_time() - start < 0.5
