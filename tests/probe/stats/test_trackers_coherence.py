"""How far rows of one call agree: counted by the joint tracker, added when profiles merge, kept in the file."""

from __future__ import annotations

import pytest
import torch

from loka.probe.capture.watch import RowNumbers
from loka.probe.stats.merge import merge_joint
from tests.support.learned_stats import joint_of


def by_pairs(x: torch.Tensor, grad: torch.Tensor) -> tuple[float, float]:
    """The definition, pair by pair, in float64."""
    x, grad = x.double(), grad.double()
    agree = (x @ x.t()) * (grad @ grad.t())
    rows = x.shape[0]
    own = agree.diagonal().sum()
    return float((agree.sum() - own) / max(rows * (rows - 1), 1)), float(own / max(rows, 1))


def learned(*calls):
    return joint_of(*zip(*calls, strict=True))


def call(rows: int, seed: int, lean: float = 0.0, scale: float = 1.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 5, generator=generator) + 1.0
    grad = torch.randn(rows, 3, generator=generator) + lean * torch.randn(1, 3, generator=generator)
    return x, grad * scale


@pytest.mark.parametrize("scale", [1.0, 1e-12])  # gradients are small: their squares do not fit into float32
def test_it_is_the_mean_over_pairs_of_different_rows(scale):
    calls = [call(40, 1, scale=scale), call(7, 2, lean=2.0, scale=scale)]
    stats = learned(*calls)
    expected = torch.tensor([by_pairs(*each) for each in calls], dtype=torch.float64).sum(0)
    torch.testing.assert_close(torch.tensor([stats.coherent, stats.incoherent]).double(), expected, rtol=1e-5, atol=0.0)


def test_rows_that_lean_one_way_show():
    apart, together = learned(call(400, 3)), learned(call(400, 3, lean=3.0))
    assert abs(apart.coherent / apart.incoherent) < 0.02
    assert together.coherent / together.incoherent > 0.2


def test_a_row_with_a_nan_is_left_out_and_one_row_has_no_pairs():
    x, grad = call(20, 4)
    spoilt = torch.cat((x, torch.full((1, 5), torch.nan))), torch.cat((grad, torch.ones(1, 3)))
    assert learned(spoilt).coherent == pytest.approx(learned((x, grad)).coherent)
    alone = learned(call(1, 5))
    assert alone.coherent == 0.0
    assert alone.incoherent > 0.0


def test_it_adds_up_when_profiles_merge():
    first, second = call(30, 6), call(12, 7, lean=1.0)
    merged, both = merge_joint(learned(first), learned(second)), learned(first, second)
    assert merged.coherent == pytest.approx(both.coherent)
    assert merged.incoherent == pytest.approx(both.incoherent)


@pytest.mark.parametrize("total", [513, 1000, 16384, 2_097_152])
def test_sampled_rows_are_different_ones_and_reach_everywhere(total):
    numbers = RowNumbers(512)
    drawn = torch.stack([numbers.draw(total, torch.device("cpu")) for _ in range(40)])
    assert all(row.unique().numel() == 512 for row in drawn)
    assert drawn.min() >= 0
    assert drawn.max() < total
    assert drawn.unique().numel() > 0.6 * min(total, 40 * 512)
    assert abs(float(drawn.double().mean()) / total - 0.5) < 0.02
