"""What the operand tracker counts, against direct float64 definitions of the same bins."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loka.numerics.enums import Operand
from loka.numerics.quantize import AMAX_FLOOR
from loka.probe.stats import site_stats as bins
from loka.probe.stats.operand_tracker import PENDING, OperandTracker, operand_stats
from tests.support.learned_stats import operand_of

VIEW = {view: place for place, view in enumerate(bins.VIEWS)}


def value_bin(value: float, lowest: int) -> int:
    """The bin of one value, straight from the definition in bins.py."""
    if value == 0.0:
        return bins.ZERO_BIN
    mantissa, exponent = math.frexp(abs(value))  # mantissa in [0.5, 1)
    half = 2 * (exponent - 1 - lowest) + (1 if mantissa >= 0.75 else 0)
    half = min(max(half, 0), bins.MAGNITUDE_BINS - 1)
    return bins.ZERO_BIN + (half + 1 if value > 0 else -half - 1)


def relative_bin(value: float, amax: float) -> int:
    """The octave of u, straight from the definition in bins.py."""
    if value == 0.0:
        return 0
    scale = float(torch.tensor(max(amax, AMAX_FLOOR)) / torch.tensor(448.0))
    u = float(torch.tensor(abs(value)) / torch.tensor(scale))
    if u == 0.0:
        return 1
    octave = math.frexp(u)[1] - 1 - bins.RELATIVE_LOWEST
    return min(max(octave + 2, 1), bins.RELATIVE_BINS - 1)


def reference(rows: Tensor, operand: Operand) -> tuple[Tensor, Tensor]:
    """Value and relative counts of one finite call, element by element."""
    height, width = rows.shape
    values = torch.zeros((width, bins.VALUE_BINS), dtype=torch.int64)
    relative = torch.zeros((len(bins.VIEWS), bins.RELATIVE_BINS), dtype=torch.int64)
    magnitude = rows.abs()
    for i in range(height):
        for j in range(width):
            value = float(rows[i, j])
            values[j, value_bin(value, bins.LOWEST[operand])] += 1
            first = j // 128 * 128
            amax = {
                bins.HistogramView.TENSORWISE: magnitude,
                bins.HistogramView.ROWWISE: magnitude[i],
                bins.HistogramView.COLUMNWISE: magnitude[:, j],
                bins.HistogramView.BLOCKWISE: magnitude[i, first : first + 128],
            }
            for view, block in amax.items():
                relative[VIEW[view], relative_bin(value, float(block.max()))] += 1
    return values, relative


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    height=st.integers(1, 5),
    width=st.sampled_from([1, 2, 13, 127, 128, 129, 300]),
    octaves=st.floats(0.0, 30.0),
    offset=st.integers(-50, 30),
    seed=st.integers(0, 10**6),
    operand=st.sampled_from([Operand.INPUT, Operand.GRAD_OUTPUT]),
)
def test_counts_agree_with_the_definition_of_the_bins(
    height: int, width: int, octaves: float, offset: int, seed: int, operand: Operand
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((height, width), generator=generator)
    rows = rows * 2.0 ** (torch.randn((height, width), generator=generator) * octaves / 4 + offset)
    rows[torch.rand((height, width), generator=generator) < 0.1] = 0.0
    stats = operand_of(operand, rows)
    values, relative = reference(rows, operand)
    torch.testing.assert_close(stats.values, values, rtol=0, atol=0)
    torch.testing.assert_close(stats.relative, relative, rtol=0, atol=0)


@settings(max_examples=30, deadline=None)
@given(width=st.sampled_from([3, 64, 130, 260]), offset=st.integers(-85, 60), seed=st.integers(0, 10**6))
def test_spread_agrees_with_float64_within_a_bin(width: int, offset: int, seed: int) -> None:
    rows = torch.randn((1, width), generator=torch.Generator().manual_seed(seed)) * 2.0**offset
    stats = operand_of(Operand.INPUT, rows)
    exact = rows.double()
    rms = exact.square().mean().sqrt()
    lowest = bins.LOWEST[Operand.INPUT]
    expected = {
        "row_rms": (float(rms.log2()) - lowest, bins.ROW_RMS_BINS),
        "row_spread": (float((exact.abs().max() / rms).log2()), bins.SPREAD_BINS),
    }
    for name, (octaves, count) in expected.items():
        place = min(max(math.floor(octaves * bins.SPREAD_STEPS), 0), count - 2) + 1
        seen = int(getattr(stats, name).argmax())
        assert abs(seen - place) <= 1, name
        near_edge = abs(octaves * bins.SPREAD_STEPS - round(octaves * bins.SPREAD_STEPS)) < 1e-3
        assert near_edge or seen == place, name
    tail = exact[:, (width - 1) // 128 * 128 :]
    octaves = float((tail.abs().max() / tail.square().mean().sqrt()).log2())
    low, high = (math.floor(octaves * bins.SPREAD_STEPS + edge) + 1 for edge in (-1e-3, 1e-3))
    assert int(stats.block_spread[low : high + 1].sum()) >= 1  # the last, shorter block is over its own elements


def test_non_finite_elements_are_counted_and_poison_nothing() -> None:
    generator = torch.Generator().manual_seed(3)
    good = torch.randn((6, 140), generator=generator)
    bad = good.clone()
    bad[1, 4], bad[1, 5], bad[3, 139] = math.nan, math.inf, -math.inf
    stats = operand_of(Operand.INPUT, bad)
    clean = operand_of(Operand.INPUT, good[[0, 2, 4, 5]])
    assert (stats.nonfinite, stats.nonfinite_calls, stats.sampled) == (3, 1, 6)
    assert int(stats.values.sum()) == 6 * 140 - 3
    assert stats.relative.sum(1).tolist() == [6 * 140 - 3] * 4
    assert int(stats.relative[:, 0].sum()) == 0  # no zero among the data: cleaned ones are taken out again
    assert stats.moments.count == 4
    torch.testing.assert_close(stats.moments.mean, clean.moments.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.moments.comoment, clean.moments.comoment, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats.row_rms, clean.row_rms)
    torch.testing.assert_close(stats.block_spread, clean.block_spread)
    assert stats.column_amax.tolist() == [0.0] * 140  # the call was not finite throughout
    assert int(stats.call_amax.sum()) == 1
    top = 1 + math.floor(bins.SPREAD_STEPS * (float(good.abs().max().log2()) - bins.LOWEST[Operand.INPUT]))
    assert int(stats.call_amax[top]) == 1  # of the finite ones


def test_a_call_with_non_finites_outside_of_the_sample() -> None:
    tracker = OperandTracker(Operand.INPUT, 2, "cpu")
    tracker.update(torch.tensor([[1.0, 4.0]]), torch.tensor([math.nan, 8.0]), 100)
    tracker.update(torch.tensor([[1.0, 4.0]]), torch.tensor([2.0, 5.0]), 100)
    stats = operand_stats(tracker.snapshot())
    assert (stats.nonfinite, stats.nonfinite_calls, stats.rows, stats.sampled) == (0, 1, 200, 2)
    assert stats.column_amax.tolist() == [2.0, 5.0]


def test_a_call_without_a_finite_element_is_no_call_of_zeros() -> None:
    tracker = OperandTracker(Operand.GRAD_OUTPUT, 2, "cpu")
    for value in (math.nan, 4.0, math.inf, 0.0, math.nan):
        rows = torch.full((3, 2), value)
        tracker.update(rows, rows.abs().amax(0), 3)
    stats = operand_stats(tracker.snapshot())
    assert (stats.calls, stats.nonfinite_calls) == (5, 3)
    assert int(stats.call_amax.sum()) == 2
    assert int(stats.call_amax[0]) == 1


def test_the_scale_of_a_call_is_over_all_its_rows_not_the_sampled_ones() -> None:
    tracker = OperandTracker(Operand.INPUT, 1, "cpu")
    tracker.update(torch.tensor([[1.0]]), torch.tensor([448.0]), 100)
    stats = operand_stats(tracker.snapshot())
    one, top = 2 - bins.RELATIVE_LOWEST, 2 + 8 - bins.RELATIVE_LOWEST
    expected = {
        bins.HistogramView.TENSORWISE: one,
        bins.HistogramView.COLUMNWISE: one,
        bins.HistogramView.ROWWISE: top,
        bins.HistogramView.BLOCKWISE: top,
    }
    for view, place in expected.items():
        assert int(stats.relative[VIEW[view], place]) == 1, view


@pytest.mark.parametrize("total", [0, 7])
def test_calls_of_which_no_row_is_sampled(total: int) -> None:
    tracker = OperandTracker(Operand.GRAD_OUTPUT, 5, "cpu")
    tracker.update(torch.zeros(0, 5), torch.full((5,), 3.0), total)
    stats = operand_stats(tracker.snapshot())
    assert (stats.calls, stats.rows, stats.sampled, stats.nonfinite_calls) == (1, total, 0, 0)
    assert int(stats.values.sum()) == int(stats.relative.sum()) == int(stats.row_rms.sum()) == 0
    assert stats.moments.count == 0
    assert stats.column_amax.tolist() == [3.0 if total else 0.0] * 5


def test_rows_of_zeros() -> None:
    stats = operand_of(Operand.INPUT, torch.zeros(4, 200))
    assert int(stats.values[:, bins.ZERO_BIN].sum()) == 800
    assert stats.relative[:, 0].tolist() == [800] * 4
    assert int(stats.relative.sum()) == 3200
    assert int(stats.row_rms[0]) == int(stats.row_spread[0]) == 4
    assert int(stats.block_spread[0]) == 8
    assert int(stats.call_amax[0]) == 1
    assert float(stats.moments.comoment.abs().max()) == 0.0


def test_huge_and_tiny_finite_values_stay_finite_everywhere() -> None:
    rows = torch.tensor([[3.4e38, -3.4e38, 1.0], [1e-45, -1e-45, 1e-38], [1.0, 2.0, 4.0]])
    stats = operand_of(Operand.INPUT, rows)
    assert int(stats.values.sum()) == 9
    assert stats.relative.sum(1).tolist() == [9] * 4
    assert stats.relative[:, 0].tolist() == [0] * 4
    assert stats.moments.count == 2  # 3.4e38 squared is no float32
    assert bool(stats.moments.comoment.isfinite().all())
    assert int(stats.row_rms[0]) == 0
    assert int(stats.row_spread[0]) == 0


def test_a_wide_operand_is_binned_view_by_view_with_the_same_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn((9, 300), generator=torch.Generator().manual_seed(0))
    at_once = operand_of(Operand.INPUT, rows)
    monkeypatch.setattr("loka.probe.stats.operand_tracker.TOGETHER", 0)
    one_by_one = operand_of(Operand.INPUT, rows)
    torch.testing.assert_close(one_by_one.relative, at_once.relative, rtol=0, atol=0)
    torch.testing.assert_close(one_by_one.block_spread, at_once.block_spread, rtol=0, atol=0)


def test_memory_of_a_wide_operand_grows_with_its_width_only() -> None:
    def held(width: int) -> int:
        tracker = OperandTracker(Operand.INPUT, width, "cpu")
        return sum(value.numel() for value in vars(tracker).values() if isinstance(value, Tensor)) + sum(
            value.numel() for value in tracker.snapshot().tensors.values()
        )

    assert held(4096) < 1000 * 4096
    assert held(8192) < 2.1 * held(4096)


def test_a_snapshot_does_not_move_with_later_updates() -> None:
    tracker = OperandTracker(Operand.INPUT, 3, "cpu")
    tracker.update(torch.ones(2, 3), torch.ones(3), 2)
    snapshot = tracker.snapshot()
    tracker.update(torch.full((2, 3), 5.0), torch.full((3,), 5.0), 2)
    stats = operand_stats(snapshot)
    assert (stats.calls, stats.moments.count) == (1, 2)
    assert stats.column_amax.tolist() == [1.0] * 3
    assert stats.moments.mean.tolist() == [1.0] * 3


def test_maxima_of_more_calls_than_are_kept_at_once() -> None:
    tracker = OperandTracker(Operand.INPUT, 2, "cpu")
    for call in range(2 * PENDING + 44):
        tracker.update(torch.ones(1, 2), torch.full((2,), 2.0 ** (call % 3)), 1)
    one = 1 - bins.SPREAD_STEPS * bins.LOWEST[Operand.INPUT]
    for _ in range(2):  # reading changes nothing
        counts = operand_stats(tracker.snapshot()).call_amax
        assert {b: n for b, n in enumerate(counts.tolist()) if n} == {one: 186, one + 8: 185, one + 16: 185}
