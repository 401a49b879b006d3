"""Batched Welford on the device, exact merging, and the covariance from the sketch, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loka.probe.stats import moments
from loka.probe.stats.moments import JointTracker, MomentsTracker, covariance, joint_stats, moments_stats, subset
from loka.probe.stats.site_stats import CHECKS, FULL_WIDTH, JOINT, SKETCH, LowRank, Moments


def one_pass(rows: Tensor) -> Moments:
    """Two-pass float64 moments: the truth."""
    exact = rows.double()
    mean = exact.mean(0)
    centred = exact - mean
    width = rows.shape[1]
    comoment = centred.t() @ (centred if width <= FULL_WIDTH else centred @ moments.sketch_matrix(width).double())
    return Moments(len(rows), mean, centred.square().sum(0), comoment)


def learn(width: int, *batches: Tensor) -> Moments:
    tracker = MomentsTracker(width, "cpu")
    for batch in batches:
        tracker.update(batch)
    return moments_stats(tracker.snapshot())


def assert_same(a: Moments, b: Moments, tolerance: float) -> None:
    """Equal up to `tolerance` of the largest entry of each tensor."""
    assert a.count == b.count
    for name in ("mean", "diagonal", "comoment"):
        left, right = getattr(a, name), getattr(b, name)
        scale = float(right.abs().max())
        torch.testing.assert_close(left, right, rtol=0, atol=tolerance * max(scale, 1e-300), msg=name)


def dense(low: LowRank) -> Tensor:
    return low.factor @ low.factor.t() + torch.diag(low.diagonal)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 1),
    width=st.sampled_from([1, 2, 7, 33, FULL_WIDTH + 1]),
    shift=st.floats(-1e3, 1e3),
    octaves=st.integers(-20, 20),
    seed=st.integers(0, 10**6),
)
def test_batches_on_the_device_give_what_one_float64_pass_gives(
    sizes: list[int], width: int, shift: float, octaves: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    batches = [(torch.randn((n, width), generator=generator) + shift) * 2.0**octaves for n in sizes]
    learned, truth = learn(width, *batches), one_pass(torch.cat(batches))
    assert learned.count == truth.count
    unit = 2.0**octaves
    rounding = 1e-6 * (1.0 + abs(shift))  # float32, of a mean of this size
    torch.testing.assert_close(learned.mean, truth.mean, rtol=0, atol=unit * rounding)
    size = unit**2 * truth.count * (1.0 if width <= FULL_WIDTH else 40.0)
    torch.testing.assert_close(learned.comoment, truth.comoment, rtol=0, atol=size * 20 * rounding)
    torch.testing.assert_close(learned.diagonal, truth.diagonal, rtol=0, atol=unit**2 * truth.count * 20 * rounding)


def test_shifted_data_where_sums_of_squares_would_fail() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn((256, 8), generator=generator) + 1e4 for _ in range(40)]
    rows = torch.cat(batches)
    naive = (rows.square().sum(0) / len(rows) - rows.mean(0).square()).double()
    truth = rows.double().var(0)
    assert float(((naive - truth) / truth).abs().max()) > 0.1
    learned = learn(8, *batches)
    result = covariance(learned)
    assert isinstance(result, Tensor)
    torch.testing.assert_close(result, torch.cov(rows.double().t()), rtol=0, atol=2e-3)


@settings(max_examples=40, deadline=None)
@given(
    first=st.integers(1, 60),
    second=st.integers(1, 60),
    width=st.sampled_from([1, 5, FULL_WIDTH + 3]),
    shift=st.floats(-1e3, 1e3),
    scale=st.floats(1e-3, 1e3),
    seed=st.integers(0, 10**6),
)
def test_merging_unequal_shifted_shards_is_exact(
    first: int, second: int, width: int, shift: float, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn((first, width), generator=generator, dtype=torch.float64)
    b = torch.randn((second, width), generator=generator, dtype=torch.float64) * scale + shift
    assert_same(moments.merge(one_pass(a), one_pass(b)), one_pass(torch.cat((a, b))), 1e-12)


def test_merging_with_nothing() -> None:
    rows = one_pass(torch.randn((4, 3), generator=torch.Generator().manual_seed(0)))
    nothing = learn(3)
    assert moments.merge(rows, nothing) is rows
    assert moments.merge(nothing, rows) is rows


def test_rows_that_cannot_be_used_are_left_out() -> None:
    rows = torch.randn((6, 5), generator=torch.Generator().manual_seed(1))
    spoilt = rows.clone()
    spoilt[0, 0], spoilt[2, 4], spoilt[5, 1] = math.nan, -math.inf, 1e30  # the last one squared is no float32
    assert_same(learn(5, spoilt), learn(5, rows[[1, 3, 4]]), 1e-6)
    only_bad = learn(5, torch.full((3, 5), math.nan), rows)
    assert_same(only_bad, learn(5, rows), 1e-6)


def test_no_row_and_one_row() -> None:
    nothing = learn(4, torch.zeros(0, 4))
    assert nothing.count == 0
    row = torch.tensor([[1.0, -2.0, 3.0, 1e4]])
    learned = learn(4, row)
    assert learned.count == 1
    assert learned.mean.tolist() == row[0].tolist()
    for one in (nothing, learned):
        result = covariance(one)
        assert isinstance(result, Tensor)
        assert float(result.abs().max()) == 0.0


def test_autocast_does_not_lower_the_precision() -> None:
    rows = torch.randn((64, 16), generator=torch.Generator().manual_seed(2)) + 3.0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = learn(16, rows)
    assert_same(inside, learn(16, rows), 0.0)


def test_the_sketch_matrix_depends_on_the_width_alone() -> None:
    a = moments.sketch_matrix(600)
    torch.manual_seed(17)
    torch.testing.assert_close(moments.sketch_matrix(600), a, rtol=0, atol=0)
    assert a.shape == (600, SKETCH + CHECKS)
    assert abs(float(a.mean())) < 0.02
    assert abs(float(a.std()) - 1.0) < 0.02
    assert not torch.equal(moments.sketch_matrix(601)[:600], a)


@pytest.mark.parametrize("width", [600, 1000])
def test_low_rank_plus_diagonal_is_recovered_and_its_variances_are_exact(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    factor = torch.randn((width, 20), generator=generator, dtype=torch.float64)
    noise = torch.rand(width, generator=generator, dtype=torch.float64) + 0.5
    truth = factor @ factor.t() + torch.diag(noise)
    test = moments.sketch_matrix(width).double()
    found = moments.low_rank(truth @ test, truth.diagonal())
    assert found.error < 0.01
    assert float((dense(found) - truth).norm() / truth.norm()) < 0.01
    torch.testing.assert_close(dense(found).diagonal(), truth.diagonal(), rtol=1e-12, atol=0)
    assert found.factor.shape[1] <= SKETCH


@pytest.mark.parametrize("decay", [0.5, 1.0, 2.0])
def test_the_stated_error_of_the_sketch_is_the_true_one(decay: float) -> None:
    width = 640
    generator = torch.Generator().manual_seed(5)
    basis = torch.linalg.qr(torch.randn((width, width), generator=generator, dtype=torch.float64)).Q
    rows = torch.randn((4096, width), generator=generator, dtype=torch.float64)
    rows = (rows * torch.arange(1, width + 1) ** (-decay / 2)) @ basis.t() + 5.0
    learned = learn(width, *rows.float().split(512))
    found = covariance(learned)
    assert isinstance(found, LowRank)
    truth = torch.cov(rows.t())
    true_error = float((dense(found) - truth).norm() / truth.norm())
    assert found.error == pytest.approx(true_error, rel=0.35, abs=2e-3)
    torch.testing.assert_close(dense(found).diagonal(), truth.diagonal(), rtol=1e-3, atol=0)
    assert float(found.diagonal.min()) >= 0.0


def test_wide_rows_that_never_vary_have_a_covariance_of_zero() -> None:
    found = covariance(learn(FULL_WIDTH + 5, torch.zeros(10, FULL_WIDTH + 5)))
    assert isinstance(found, LowRank)
    assert found.error == 0.0
    assert float(dense(found).abs().max()) == 0.0


def test_memory_of_wide_rows_is_bounded_by_the_sketch() -> None:
    width = 8192
    snapshot = MomentsTracker(width, "cpu").snapshot()
    assert sum(tensor.numel() for tensor in snapshot.tensors.values()) == width * (SKETCH + CHECKS + 2) + 1


def test_joint_moments_are_of_the_chosen_features_of_both_sides() -> None:
    tracker = JointTracker(300, 20, "cpu")
    generator = torch.Generator().manual_seed(9)
    x = torch.randn((50, 300), generator=generator)
    grad = x[:, :20] * 0.5 + torch.randn((50, 20), generator=generator)
    tracker.update(x[:, tracker.input_features], grad[:, tracker.grad_features])
    stats = joint_stats(tracker.snapshot())
    assert (stats.input_features.numel(), stats.grad_features.tolist()) == (JOINT, list(range(20)))
    truth = one_pass(torch.cat((x[:, stats.input_features], grad), 1))
    assert_same(stats.moments, truth, 1e-5)


def test_subsets_are_ascending_distinct_and_the_same_every_time() -> None:
    chosen = subset(1000, 128)
    torch.manual_seed(3)
    assert torch.equal(subset(1000, 128), chosen)
    assert chosen.unique().numel() == 128
    assert bool((chosen.diff() > 0).all())
    assert (int(chosen.min()) >= 0, int(chosen.max()) < 1000) == (True, True)
    assert subset(5, 128).tolist() == [0, 1, 2, 3, 4]
