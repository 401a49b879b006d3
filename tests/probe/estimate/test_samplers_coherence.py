"""Rows of one call that lean one way: counted as pairs of rows agree, drawn anew for each call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loka.numerics.enums import Gemm
from loka.probe.samplers import MOST, CopulaSampler, coherence, missing
from loka.probe.stats.moments import covariance
from loka.probe.stats.site_stats import JointStats, SiteStats
from tests.support.learned_stats import joint_of, site_of

WIDTH, M, CALLS = 24, 256, 60


def pairs(x: Tensor, grad: Tensor) -> tuple[float, float]:
    """Means of (x.x')(g.g') over pairs of different rows, and over each row with itself."""
    own = float((x.square().sum(1) * grad.square().sum(1)).sum())
    return (float((grad.t() @ x).square().sum()) - own) / (M * (M - 1)), own / M


@pytest.fixture(scope="module")
def leaning() -> SiteStats:
    """Gradients that lean one way in each call, by a tenth of their deviation, and not at all over all calls."""
    generator = torch.Generator().manual_seed(0)
    inputs, grads = [], []
    for _ in range(CALLS):
        x = torch.randn((M, WIDTH), generator=generator) + 1.0
        grad = torch.randn((M, WIDTH), generator=generator) + 0.1 * torch.randn((1, WIDTH), generator=generator)
        inputs.append(x)
        grads.append(grad)
    stats = site_of(inputs, grads)
    coherent, incoherent = map(sum, zip(*map(pairs, inputs, grads), strict=True))
    return replace(stats, joint=replace(learned(stats), coherent=coherent, incoherent=incoherent))


def agreement(stats: SiteStats) -> float:
    sampler, generator = CopulaSampler(stats, M), torch.Generator().manual_seed(1)
    drawn = [sampler.draw(Gemm.WGRAD, generator) for _ in range(60)]
    found = [pairs(one.b.t(), one.a.t()) for one in drawn]
    return sum(pair[0] for pair in found) / sum(pair[1] for pair in found)


def learned(stats: SiteStats) -> JointStats:
    assert stats.joint is not None
    return stats.joint


def test_rows_of_a_draw_agree_as_those_of_a_call_did(leaning: SiteStats) -> None:
    joint = learned(leaning)
    assert agreement(leaning) == pytest.approx(joint.coherent / joint.incoherent, rel=0.25)


def test_without_the_count_rows_are_independent(leaning: SiteStats) -> None:
    joint = learned(leaning)
    alone = replace(leaning, joint=replace(joint, coherent=0.0, incoherent=0.0))
    assert abs(agreement(alone)) < 0.2 * joint.coherent / joint.incoherent


def test_what_the_pooled_moments_explain_is_not_added_again() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((4000, 8), generator=generator) + 1.0
    grad = x + torch.randn((4000, 8), generator=generator)
    found = joint_of([x], [grad])
    own = float((x.square().sum(1) * grad.square().sum(1)).mean())
    pooled = float((grad.t() @ x / 4000).square().sum())
    moments = covariance(found.moments)
    assert isinstance(moments, Tensor)
    known = missing(replace(found, coherent=pooled, incoherent=own), moments)
    assert known < 0.15 * pooled / own
    assert missing(found, moments) == 0.0


def test_coherence_is_bounded_and_absent_where_there_is_none() -> None:
    ones = torch.ones(4, dtype=torch.float64)
    factor = torch.eye(4)
    assert coherence(0.0, ones, ones, factor) is None
    assert coherence(0.1, 0 * ones, 0 * ones, factor) is None
    strong = coherence(100.0, ones, ones, factor)
    assert strong is not None
    assert float(strong.weights.square().sum()) == pytest.approx(MOST)
    scores = torch.randn((8, 20_000), generator=torch.Generator().manual_seed(0))
    both = torch.eye(8)
    made = torch.stack(
        [strong.apply(scores, 4, both, torch.Generator().manual_seed(i)).square().mean(1) for i in range(60)]
    )
    assert torch.equal(strong.apply(scores, 4, both, torch.Generator().manual_seed(0))[:4], scores[:4])
    torch.testing.assert_close(made.mean(0), torch.ones(8), rtol=0.25, atol=0.0)
    constant = coherence(0.1, ones, 0 * ones, factor)
    assert constant is not None
    assert bool(constant.apply(scores, 4, both, torch.Generator().manual_seed(0)).isfinite().all())
