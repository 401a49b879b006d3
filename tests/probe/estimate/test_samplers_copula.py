"""The copula's parts against closed forms: marginals, dependence, row scales."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loka.numerics.enums import Operand
from loka.probe import copula
from loka.probe.stats.site_stats import LOWEST, ROW_RMS_BINS, SPREAD_STEPS, VALUE_BINS, ZERO_BIN, LowRank
from tests.support.learned_stats import operand_of, seeded

LOW = LOWEST[Operand.INPUT]


def shapes_of(rows: Tensor) -> copula.Marginals:
    stats = operand_of(Operand.INPUT, rows)
    return copula.marginals(stats.values, LOW, stats.column_amax)


def middle_levels(count: int, rows: int) -> Tensor:
    return ((torch.arange(rows, dtype=torch.float64) + 0.5) / rows).expand(count, rows).contiguous()


@pytest.mark.parametrize("shape", ["normal", "lognormal", "student", "relu"])
def test_a_marginal_has_the_quantiles_that_its_histogram_was_made_of(shape: str) -> None:
    normal = torch.randn(20_000, 3, generator=seeded())
    chi = torch.randn(20_000, 4, generator=seeded(1)).square().mean(1, keepdim=True).sqrt()
    rows = {
        "normal": normal + torch.tensor([0.0, 3.0, -1.0]),
        "lognormal": normal.exp(),
        "student": normal / chi,
        "relu": normal.relu(),
    }[shape]
    drawn = shapes_of(rows).quantile(middle_levels(3, 20_000))
    real = rows.t().sort(1).values
    for level in (0.01, 0.1, 0.3, 0.7, 0.9, 0.99, 0.999):
        at = int(level * 20_000)
        # a bin is half an octave: within it, a density is only as good as a line
        torch.testing.assert_close(drawn[:, at], real[:, at], rtol=0.12, atol=0.02)
    assert float((drawn == 0).double().mean()) == pytest.approx(float((rows == 0).double().mean()), abs=1e-3)
    assert float(drawn.max()) <= float(rows.max()) * 1.001


def test_a_tail_is_not_overstated_by_its_bins() -> None:
    rows = torch.randn(50_000, 2, generator=seeded())
    drawn = shapes_of(rows).quantile(middle_levels(2, 50_000)).double()
    assert drawn.square().mean() == pytest.approx(1.0, abs=0.02)
    assert drawn.pow(4).mean() == pytest.approx(3.0, abs=0.2)


def test_fitting_meets_the_mean_and_variance_and_keeps_zeros() -> None:
    rows = torch.nn.functional.silu(torch.randn(20_000, 4, generator=seeded()) * 0.5 - 0.5)
    rows[:, 3] = rows[:, 3].relu()
    stats = operand_of(Operand.INPUT, rows)
    mean, variance = stats.moments.mean, stats.moments.diagonal / (stats.moments.count - 1)
    fitted = copula.fitted(shapes_of(rows), mean, variance)
    drawn = fitted.quantile(middle_levels(4, 20_000)).double()
    torch.testing.assert_close(drawn.mean(1), mean, rtol=0.0, atol=2e-3)
    torch.testing.assert_close(drawn.std(1), variance.sqrt(), rtol=0.05, atol=1e-3)
    assert float((drawn[3] == 0).double().mean()) == pytest.approx(float((rows[:, 3] == 0).double().mean()), abs=1e-3)


def test_an_empty_histogram_is_a_feature_of_zeros() -> None:
    values = torch.zeros(2, VALUE_BINS, dtype=torch.int64)
    shapes = copula.fitted(
        copula.marginals(values, LOW, torch.zeros(2)), torch.zeros(2).double(), torch.zeros(2).double()
    )
    assert not shapes.quantile(middle_levels(2, 100)).any()


@given(
    st.lists(st.tuples(st.integers(0, VALUE_BINS - 1), st.integers(1, 1000)), min_size=1, max_size=20),
    st.floats(0.0, 1e8),
    st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_any_histogram_gives_finite_ascending_values_within_its_bins(
    counts: list[tuple[int, int]], amax: float, seed: int
) -> None:
    values = torch.zeros(1, VALUE_BINS, dtype=torch.int64)
    for bin, count in counts:
        values[0, bin] += count
    drawn = copula.marginals(values, LOW, torch.tensor([amax])).quantile(copula.levels(1, 300, seeded(seed)))[0]
    assert bool(drawn.isfinite().all())
    assert bool((drawn.diff() >= 0).all())
    filled = values[0].nonzero().flatten()
    assert bool((drawn >= 0).all()) or int(filled.min()) < ZERO_BIN
    assert bool((drawn <= 0).all()) or int(filled.max()) > ZERO_BIN


@pytest.mark.parametrize("transform", ["identity", "relu", "cube", "exp"])
def test_correlations_after_the_marginals_are_the_learned_ones(transform: str) -> None:
    mixing = torch.randn(12, 12, generator=seeded(3)) + 1.5
    normal = torch.randn(60_000, 12, generator=seeded()) @ mixing
    normal = normal / normal.std(0)
    made = {"identity": lambda x: x, "relu": torch.relu, "cube": lambda x: x**3, "exp": torch.exp}[transform]
    rows = made(normal)
    covariance = torch.cov(rows.double().t())
    shapes = shapes_of(rows)
    scores = copula.latent(covariance, shapes).draw(60_000, seeded(5))
    torch.testing.assert_close(scores.var(1), torch.ones(12), rtol=0.05, atol=0.0)
    drawn = shapes.quantile(torch.special.ndtr(scores.double()))
    heavy = transform in ("cube", "exp")  # their sample correlations are themselves uncertain
    torch.testing.assert_close(
        torch.corrcoef(drawn.double()), torch.corrcoef(rows.double().t()), rtol=0.0, atol=0.1 if heavy else 0.03
    )


def test_a_low_rank_covariance_keeps_its_correlations() -> None:
    factor = torch.randn(600, 3, generator=seeded(), dtype=torch.float64)
    found = LowRank(factor, torch.full((600,), 0.5, dtype=torch.float64), 0.0)
    deviation = (factor.square().sum(1) + 0.5).sqrt()
    rows = torch.randn(2000, 600, generator=seeded(1)) * deviation.float()
    scores = copula.latent(found, shapes_of(rows)).draw(20_000, seeded(2))
    expected = factor @ factor.t() / torch.outer(deviation, deviation)
    expected.fill_diagonal_(1.0)
    torch.testing.assert_close(torch.corrcoef(scores).double(), expected, rtol=0.0, atol=0.05)


def test_constant_features_and_a_covariance_of_zeros_do_no_harm() -> None:
    rows = torch.ones(50, 3)
    shapes = shapes_of(rows)
    for covariance in (
        torch.zeros(3, 3, dtype=torch.float64),
        LowRank(torch.zeros(3, 2).double(), torch.zeros(3).double(), 0.0),
    ):
        drawn = shapes.quantile(torch.special.ndtr(copula.latent(covariance, shapes).draw(40, seeded()).double()))
        assert bool(drawn.isfinite().all())
        torch.testing.assert_close(drawn, torch.ones(3, 40), rtol=0.6, atol=0.0)


def test_row_scales_follow_their_histogram() -> None:
    histogram = torch.zeros(ROW_RMS_BINS, dtype=torch.int64)
    histogram[0], histogram[1 + 40 * SPREAD_STEPS] = 1, 3  # a quarter zeros, the rest in [2^0, 2^(1/8))
    drawn = copula.spread_quantile(histogram, LOW, middle_levels(1, 1000)[0])
    assert int((drawn == 0).sum()) == 250
    rest = drawn[drawn > 0].log2()
    assert float(rest.min()) >= 0.0
    assert float(rest.max()) <= 1 / SPREAD_STEPS
    assert float(rest.mean()) == pytest.approx(1 / 16, abs=1e-3)
    assert not copula.spread_quantile(torch.zeros(ROW_RMS_BINS), LOW, drawn.clamp(max=0.9)).any()
