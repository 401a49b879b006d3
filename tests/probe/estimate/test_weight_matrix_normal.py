"""The flip-flop on weights drawn from known matrix normals, and what is kept of a weight as it is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from loka.numerics.enums import Operand
from loka.probe.stats import site_stats as bins
from loka.probe.stats.site_stats import CHECKS, SKETCH, WEIGHT_ROWS, ZERO_BIN, LowRank, WeightStats
from loka.probe.stats.weight_tracker import WeightTracker, weight_stats


def known(width: int, rank: int, seed: int) -> Tensor:
    """A covariance of low rank plus a diagonal, with trace `width`."""
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn((width, rank), generator=generator, dtype=torch.float64) / rank**0.5
    matrix = factor @ factor.t() + torch.diag(torch.rand(width, generator=generator, dtype=torch.float64) + 0.2)
    return matrix * (width / matrix.trace())


def centred(matrix: Tensor) -> Tensor:
    """The covariance that is left once the additive mean, the mean over this side too, is taken out."""
    width = len(matrix)
    out = torch.eye(width, dtype=torch.float64) - 1.0 / width
    return out @ matrix @ out


def dense(low: LowRank) -> Tensor:
    return low.factor @ low.factor.t() + torch.diag(low.diagonal)


def gap(found: LowRank, truth: Tensor) -> float:
    """Relative Frobenius error up to a scale."""
    ours = dense(found)
    ours = ours * (float((ours * truth).sum()) / float(ours.square().sum()))
    return float((ours - truth).norm() / truth.norm())


def learn(u: Tensor, v: Tensor, updates: int, momentum: float = 0.99, scale: float = 0.02) -> WeightStats:
    n, k = len(u), len(v)
    tracker = WeightTracker(n, k, "cpu", momentum)
    left, right = torch.linalg.cholesky(u), torch.linalg.cholesky(v)
    generator = torch.Generator().manual_seed(1)
    for step in range(updates):
        drawn = left @ torch.randn((n, k), generator=generator, dtype=torch.float64) @ right.t()
        tracker.update((scale * drawn + 0.3).float(), step)
    return weight_stats(tracker.snapshot())


def test_known_row_and_column_covariances_are_recovered_from_many_draws() -> None:
    u, v = known(12, 3, seed=2), known(20, 3, seed=3)
    few, many = learn(u, v, 3), learn(u, v, 600, momentum=0.998)
    assert gap(many.u, centred(u)) < 0.08
    assert gap(many.v, centred(v)) < 0.08
    assert gap(many.u, centred(u)) < 0.5 * gap(few.u, centred(u))
    assert float(dense(many.u).trace()) == pytest.approx(12.0, rel=1e-5)
    # With trace(U) = N, V carries the scale: its mean diagonal is the variance of an element, of which the additive
    # mean takes some. Dividing by N where W_c has N - 1 free rows takes the rest.
    kept = float(centred(u).trace() / 12 * centred(v).trace() / 20) * 11 / 12
    assert float(dense(many.v).trace()) / 20 == pytest.approx(0.02**2 * kept, rel=0.04)
    assert (many.updates, many.step, many.u.error, many.v.error) == (600, 599, 0.0, 0.0)


def test_one_side_above_the_full_width_is_sketched_and_still_recovered() -> None:
    u, v = known(520, 4, seed=4), known(24, 3, seed=5)
    stats = learn(u, v, 120)
    assert gap(stats.v, centred(v)) < 0.15
    assert stats.u.factor.shape[1] <= SKETCH
    assert gap(stats.u, centred(u)) < 0.15
    assert 0.0 < stats.u.error < 0.1
    assert float(dense(stats.u).trace()) == pytest.approx(520.0, rel=1e-5)


def test_the_sketched_flip_flop_follows_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    u, v = known(150, 4, seed=6), known(130, 4, seed=7)
    whole = learn(u, v, 40)
    for module in ("weight_tracker", "moments"):
        monkeypatch.setattr(f"loka.probe.stats.{module}.FULL_WIDTH", 100)
    sketched = learn(u, v, 40)
    for ours, theirs, truth in ((sketched.u, whole.u, u), (sketched.v, whole.v, v)):
        assert gap(theirs, centred(truth)) < 0.1
        assert gap(ours, centred(truth)) < 1.2 * gap(theirs, centred(truth)) + ours.error
        assert 0.0 < ours.error < 0.1
        assert theirs.error == 0.0
    # trace(U) = N on both, so V carries the scale, and low rank inverses must not change it.
    assert float(dense(sketched.v).trace()) == pytest.approx(float(dense(whole.v).trace()), rel=0.12)


def test_the_first_update_in_closed_form() -> None:
    # From U = I, V = s I with s = mean(W_c^2), half and half gives U = (I + W_c W_c^T / (K s)) / 2 before scaling.
    weight = torch.randn((3, 5), generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    tracker = WeightTracker(3, 5, "cpu")
    tracker.update(weight.float(), 7)
    stats = weight_stats(tracker.snapshot())
    rows, columns = weight.mean(1), weight.mean(0) - weight.mean()
    rest = weight - rows[:, None] - columns
    s = rest.square().mean()
    u = (torch.eye(3) + rest @ rest.t() / (5 * s)) / 2
    v = (s * torch.eye(5) + rest.t() @ torch.linalg.inv(u) @ rest / 3) / 2
    scale = u.trace() / 3
    torch.testing.assert_close(dense(stats.u), u / scale, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dense(stats.v), v * scale, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stats.row_mean, rows, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stats.column_mean, columns, rtol=1e-5, atol=1e-6)


def test_what_is_kept_of_the_weight_as_it_is() -> None:
    weight = torch.randn((300, 20), generator=torch.Generator().manual_seed(9))
    weight[7, 3] = -9.0
    tracker = WeightTracker(300, 20, "cpu")
    tracker.update(torch.zeros(300, 20), 1)
    tracker.update(weight.bfloat16(), 2)
    stats = weight_stats(tracker.snapshot())
    held = weight.bfloat16().float()
    assert stats.rows.shape == (WEIGHT_ROWS, 20)
    assert torch.equal(stats.rows, held[stats.row_index])
    assert torch.equal(stats.columns, held)
    assert stats.column_index.tolist() == list(range(20))
    assert (stats.amax, stats.step, stats.updates) == (9.0, 2, 2)
    assert torch.equal(stats.row_amax, held.abs().amax(1).double())
    assert torch.equal(stats.column_amax, held.abs().amax(0).double())
    assert int(stats.values.sum()) == 6000
    minus_nine = bins.ZERO_BIN - (2 * (3 - bins.LOWEST[Operand.WEIGHT]) + 1)  # 9 lies in [8, 12)
    assert int(stats.values[: minus_nine + 1].sum()) == int(stats.values[minus_nine]) == 1


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (3, 600)])
def test_weights_of_one_row_or_column_or_all_zeros_stay_finite(shape: tuple[int, int]) -> None:
    tracker = WeightTracker(*shape, "cpu")
    for step in range(50):
        tracker.update(torch.zeros(shape), step)
    tracker.update(torch.ones(shape) * 1e-3, 50)
    stats = weight_stats(tracker.snapshot())
    for side in (stats.u, stats.v):
        assert bool(dense(side).isfinite().all())
    assert float(dense(stats.u).trace()) == pytest.approx(shape[0], rel=1e-3)


def test_non_finite_weights_are_counted_and_taken_as_zero() -> None:
    weight = torch.randn((6, 9), generator=torch.Generator().manual_seed(10))
    zeroed, spoilt = weight.clone(), weight.clone()
    for place, value in (((0, 0), math.nan), ((1, 2), math.inf), ((5, 8), -math.inf)):
        zeroed[place], spoilt[place] = 0.0, value
    results = []
    for given in (zeroed, spoilt):
        tracker = WeightTracker(6, 9, "cpu")
        tracker.update(given, 0)
        results.append(weight_stats(tracker.snapshot()))
    clean, counted = results
    assert (clean.nonfinite, counted.nonfinite) == (0, 3)
    assert torch.equal(dense(clean.u), dense(counted.u))
    assert torch.equal(clean.rows, counted.rows)
    assert clean.amax == counted.amax
    assert (int(clean.values[ZERO_BIN]), int(counted.values[ZERO_BIN])) == (3, 0)
    assert (int(clean.values.sum()), int(counted.values.sum())) == (54, 51)


def test_an_update_that_overflows_leaves_the_matrix_normal_as_it_was() -> None:
    tracker = WeightTracker(4, 5, "cpu")
    weight = torch.randn((4, 5), generator=torch.Generator().manual_seed(11))
    tracker.update(weight, 0)
    before = weight_stats(tracker.snapshot())
    tracker.update(weight * 1e38, 1)
    after = weight_stats(tracker.snapshot())
    assert after.amax > 1e37
    for side in (after.u, after.v):
        assert bool(dense(side).isfinite().all())
    assert torch.equal(dense(after.u), dense(before.u))


def test_memory_of_a_wide_weight_is_bounded() -> None:
    n, k = 4096, 3000
    tracker = WeightTracker(n, k, "cpu")
    held = sum(tensor.numel() for tensor in tracker.snapshot().tensors.values())
    assert held == (n + k) * (SKETCH + CHECKS + 1) + 2 * WEIGHT_ROWS
    assert held < 0.05 * (n * n + k * k)
