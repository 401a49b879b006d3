"""Draws of the sampler, and of the two that the held-out study compares it with, against known distributions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.held_out.gaussian_samplers import GaussianSampler, NormalSampler, median_amax, normal_amax
from loka.numerics.enums import Gemm
from loka.probe.samplers import CopulaSampler, Sampler
from loka.probe.stats.site_stats import LowRank, SiteStats
from tests.support.learned_stats import seeded, site_of, weight_of

K, N, M = 48, 32, 600


def site_stats(x: Tensor, grad: Tensor, weight: Tensor, calls: int = 20) -> SiteStats:
    """What the trackers learn from `calls` equal parts of x and grad; the weight's elements are independent."""
    variance = LowRank(
        torch.zeros(weight.shape[1], 1).double(), torch.full((weight.shape[1],), float(weight.var())).double(), 0.0
    )
    return site_of(x.chunk(calls), grad.chunk(calls), weight_of(weight, v=variance))


@pytest.fixture(scope="module")
def heavy() -> tuple[SiteStats, Tensor, Tensor]:
    """Correlated inputs after a ReLU, gradients with row scales over octaves that depend on the inputs."""
    rows = 20 * M
    x = (torch.randn(rows, K, generator=seeded()) @ (torch.randn(K, K, generator=seeded(1)) / 7 + 0.1)).relu()
    scale = torch.exp(1.2 * torch.randn(rows, 1, generator=seeded(2)))
    lead = x[:, :1] - x[:, :1].mean()
    grad = 1e-4 * scale * (torch.randn(rows, N, generator=seeded(3)) + 0.5 * lead)
    return site_stats(x, grad, torch.randn(N, K, generator=seeded(4)) / 7), x, grad


@pytest.mark.parametrize("make", [NormalSampler, GaussianSampler, CopulaSampler])
def test_operands_have_the_shapes_of_the_gemm(
    make: type[NormalSampler] | type[GaussianSampler] | type[CopulaSampler], heavy: tuple[SiteStats, Tensor, Tensor]
) -> None:
    sampler: Sampler = make(heavy[0], M)
    shapes = {}
    for gemm in Gemm:
        drawn = sampler.draw(gemm, seeded())
        shapes[gemm] = (tuple(drawn.a.shape), tuple(drawn.b.shape))
        for x, amax in ((drawn.a, drawn.amax_a), (drawn.b, drawn.amax_b)):
            assert x.dtype is torch.float32
            assert x.is_contiguous()
            assert bool(x.isfinite().all())
            assert amax is None or amax >= float(x.abs().max())
    assert shapes == {
        Gemm.FPROP: ((256, K), (N, K)),
        Gemm.DGRAD: ((256, N), (K, N)),
        Gemm.WGRAD: ((N, M), (K, M)),
    }


@pytest.mark.parametrize("make", [NormalSampler, GaussianSampler, CopulaSampler])
def test_draws_follow_the_generator_alone(
    make: type[NormalSampler] | type[GaussianSampler] | type[CopulaSampler], heavy: tuple[SiteStats, Tensor, Tensor]
) -> None:
    sampler: Sampler = make(heavy[0], 64)
    state = torch.random.get_rng_state()
    for gemm in Gemm:
        one, same, other = (sampler.draw(gemm, seeded(seed)) for seed in (1, 1, 2))
        assert torch.equal(one.a, same.a)
        assert torch.equal(one.b, same.b)
        assert not torch.equal(one.a, other.a)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_copula_draws_the_learned_moments_marginals_and_row_scales(
    heavy: tuple[SiteStats, Tensor, Tensor],
) -> None:
    stats, x, _ = heavy
    sampler = CopulaSampler(stats, M)
    drawn = torch.cat([sampler.draw(Gemm.FPROP, generator).a for generator in [seeded()] for _ in range(40)])
    torch.testing.assert_close(drawn.mean(0), x.mean(0), rtol=0.05, atol=0.02)
    torch.testing.assert_close(drawn.std(0), x.std(0), rtol=0.06, atol=0.0)
    torch.testing.assert_close(torch.corrcoef(drawn.t()), torch.corrcoef(x.t()), rtol=0.0, atol=0.12)
    assert float((drawn == 0).double().mean()) == pytest.approx(float((x == 0).double().mean()), abs=0.01)
    for level in (0.05, 0.5, 0.95):
        made, real = (part.square().mean(1).sqrt().quantile(level) for part in (drawn, x))
        assert float(made) == pytest.approx(float(real), rel=0.06)


def test_the_copula_keeps_rows_that_are_much_larger_than_others(heavy: tuple[SiteStats, Tensor, Tensor]) -> None:
    stats, _, grad = heavy
    sampler, generator = CopulaSampler(stats, M), seeded()
    drawn = torch.cat([sampler.draw(Gemm.DGRAD, generator).a for _ in range(20)])
    spread = [float(part.square().mean(1).sqrt().log2().std()) for part in (drawn, grad)]
    assert spread[0] == pytest.approx(spread[1], rel=0.1)
    gaussian = GaussianSampler(stats, M)
    normal = gaussian.draw(Gemm.DGRAD, generator).a.square().mean(1).sqrt().log2().std()
    assert float(normal) < 0.6 * spread[1]  # which a Gaussian with independent rows cannot have


def test_both_operands_of_a_weight_gradient_are_drawn_together(heavy: tuple[SiteStats, Tensor, Tensor]) -> None:
    stats, x, grad = heavy
    real = grad.t() @ x / x.shape[0]
    copula, gaussian = CopulaSampler(stats, M), GaussianSampler(stats, M)
    sums = []
    for sampler in (copula, gaussian):
        generator = seeded()
        draws = [sampler.draw(Gemm.WGRAD, generator) for _ in range(30)]
        sums.append(torch.stack([drawn.a @ drawn.b.t() / M for drawn in draws]).mean(0))
    coherent = float((sums[0] * real).sum() / real.square().sum())
    assert coherent == pytest.approx(1.0, abs=0.2)
    assert abs(float((sums[1] * real).sum() / real.square().sum())) < 0.5


def test_a_sum_over_rows_fluctuates_as_that_of_independent_rows() -> None:
    x = torch.randn(20 * M, 8, generator=seeded()) + 2.0
    grad = torch.randn(20 * M, 8, generator=seeded(1))
    sampler, generator = CopulaSampler(site_stats(x, grad, torch.ones(8, 8)), M), seeded()
    sums = torch.stack([drawn.a.sum(1) for drawn in (sampler.draw(Gemm.WGRAD, generator) for _ in range(100))])
    assert float(sums.std(0).mean()) == pytest.approx(M**0.5, rel=0.15)


def test_the_gaussian_has_the_learned_mean_and_covariance(heavy: tuple[SiteStats, Tensor, Tensor]) -> None:
    stats, x, _ = heavy
    sampler, generator = GaussianSampler(stats, M), seeded()
    drawn = torch.cat([sampler.draw(Gemm.FPROP, generator).a for _ in range(40)])
    torch.testing.assert_close(drawn.mean(0), x.mean(0), rtol=0.0, atol=0.06)
    torch.testing.assert_close(torch.cov(drawn.t()), torch.cov(x.t()), rtol=0.0, atol=0.12)


@pytest.mark.slow
def test_the_matrix_normal_has_its_means_and_its_covariances() -> None:
    left = torch.tensor([[2.0, 0.0], [1.0, 1.0], [0.0, 0.5]], dtype=torch.float64)
    right = torch.tensor([[1.0], [-1.0], [0.5], [0.0]], dtype=torch.float64)
    base = weight_of(torch.randn(3, 4, generator=seeded()))
    weight = replace(
        base,
        row_mean=torch.tensor([1.0, 2.0, 3.0]).double(),
        column_mean=torch.tensor([0.0, 10.0, 0.0, 0.0]).double(),
        u=LowRank(left, torch.tensor([0.1, 0.2, 0.3]).double(), 0.0),
        v=LowRank(right, torch.tensor([0.5, 0.5, 0.5, 1.0]).double(), 0.0),
    )
    stats = site_stats(torch.randn(80, 4, generator=seeded()), torch.randn(80, 3, generator=seeded(1)), base.rows)
    sampler, generator = GaussianSampler(replace(stats, weight=weight), 20), seeded()
    for gemm, means, u, v in (
        (Gemm.FPROP, (weight.row_mean, weight.column_mean), weight.u, weight.v),
        (Gemm.DGRAD, (weight.column_mean, weight.row_mean), weight.v, weight.u),
    ):
        drawn = torch.stack([sampler.draw(gemm, generator).b.sort(0).values for _ in range(4000)]).double()
        # rows come in random order: sums over rows do not mind
        total = drawn.sum(1)
        expected = means[0].sum() + means[0].numel() * means[1]
        torch.testing.assert_close(total.mean(0), expected, rtol=0.0, atol=0.25)
        among = v.factor @ v.factor.t() + v.diagonal.diag()
        within = float((u.factor @ u.factor.t() + u.diagonal.diag()).sum())
        torch.testing.assert_close(torch.cov(total.t()), within * among, rtol=0.15, atol=0.6)


def test_the_maximum_is_that_of_the_whole_operand() -> None:
    for count in (1, 1000, 10**7):
        inside = torch.special.erf(torch.tensor(normal_amax(count) / 2**0.5, dtype=torch.float64))
        assert float(inside**count) == pytest.approx(0.5, abs=1e-6)
    found = median_amax(torch.zeros(10).double(), torch.full((10,), 3.0).double(), 50)
    assert found == pytest.approx(3 * normal_amax(500), rel=1e-3)


def test_tensorwise_scales_take_the_usual_maximum_of_a_call(heavy: tuple[SiteStats, Tensor, Tensor]) -> None:
    stats, x, _ = heavy
    usual = float(x.abs().view(20, M, K).amax((1, 2)).median())
    drawn = CopulaSampler(stats, M).draw(Gemm.FPROP, seeded())
    assert drawn.amax_a is not None
    assert drawn.amax_a >= usual * 2**-0.125  # bins of an eighth of an octave
    assert drawn.amax_b == stats.weight.amax if stats.weight else False


def test_parts_that_were_not_seen_cannot_be_drawn(heavy: tuple[SiteStats, Tensor, Tensor]) -> None:
    stats = heavy[0]
    cases = [
        (replace(stats, input=None), {Gemm.FPROP: False, Gemm.DGRAD: True, Gemm.WGRAD: False}),
        (replace(stats, weight=None), {Gemm.FPROP: False, Gemm.DGRAD: False, Gemm.WGRAD: True}),
        (replace(stats, grad_output=None), {Gemm.FPROP: True, Gemm.DGRAD: False, Gemm.WGRAD: False}),
        (replace(stats, joint=None), {Gemm.FPROP: True, Gemm.DGRAD: True, Gemm.WGRAD: False}),
    ]
    for given, expected in cases:
        sampler = CopulaSampler(given, M)
        assert {gemm: sampler.can_draw(gemm) for gemm in Gemm} == expected


@pytest.mark.parametrize("make", [GaussianSampler, CopulaSampler])
def test_operands_of_zeros_and_single_rows_are_drawn_as_such(
    make: type[GaussianSampler] | type[CopulaSampler],
) -> None:
    stats = site_stats(torch.zeros(40, 5), torch.zeros(40, 3), torch.zeros(3, 5))
    sampler: Sampler = make(stats, 1)
    for gemm in Gemm:
        drawn = sampler.draw(gemm, seeded())
        assert not drawn.a.any()
        assert not drawn.b.any()


def test_wide_operands_are_drawn_from_their_sketch() -> None:
    factor = torch.randn(4, 700, generator=seeded())
    x = torch.randn(3000, 4, generator=seeded(1)) @ factor + 0.5 * torch.randn(3000, 700, generator=seeded(2))
    stats = site_stats(x, torch.randn(3000, 16, generator=seeded(3)), torch.randn(16, 700, generator=seeded(4)))
    direction = factor[0] / factor[0].norm()
    real = float((x @ direction).var())
    for sampler in (CopulaSampler(stats, M), GaussianSampler(stats, M)):
        generator = seeded()
        drawn = torch.cat([sampler.draw(Gemm.FPROP, generator).a for _ in range(10)])
        assert float((drawn @ direction).var()) == pytest.approx(real, rel=0.1)
