"""Estimated errors: closed forms, degenerate operands, stopping, and a kernel with a planted fault."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loka.errors import InputError
from loka.numerics.enums import OPERANDS, Format, Gemm, Operand, Range, Scaling
from loka.numerics.recipe import OperandRecipe
from loka.policy.settings import Budget
from loka.probe.estimate import candidates, errors, estimate, estimate_site, recipe_label, seed_for
from loka.probe.profile.profile import Verdict
from loka.probe.samplers import CopulaSampler, Drawn
from loka.probe.stats.site_stats import SiteStats
from tests.support.learned_stats import seeded, site_of, weight_of

E4M3 = (OperandRecipe(), OperandRecipe())

TENSORWISE = (OperandRecipe(scaling=Scaling.TENSORWISE),) * 2
E5M2 = (OperandRecipe(format=Format.E5M2),) * 2


def site(x: Tensor, grad: Tensor, weight: Tensor) -> SiteStats:
    return site_of([x], [grad], weight_of(weight), "layers.0")


@pytest.fixture(scope="module")
def heavy() -> SiteStats:
    x = torch.randn(4096, 64, generator=seeded()) * torch.exp(1.5 * torch.randn(4096, 1, generator=seeded(1)))
    return site(x, torch.randn(4096, 32, generator=seeded(2)), torch.randn(32, 64, generator=seeded(3)) / 8)


def test_rounding_noise_of_a_uniform_mantissa_is_the_closed_form() -> None:
    """e4m3's steps of 1/8 in [1, 2) leave a noise of (1/8)^2 / 12."""
    a = 1 + 0.75 * torch.rand((400, 500), generator=seeded())
    a[:, 0] = 1.75  # the largest of every row: 1.75 / 448 is a power of two, which keeps mantissas as they are
    b = torch.eye(500)
    _, found = errors(Drawn(a, b, None, None), E4M3)
    power = ((1.75**3 - 1) / 3) / 0.75
    # the unit matrix is quantized exactly, so that all noise is a's
    assert found == pytest.approx(10 * math.log10(power / (0.125**2 / 12)), abs=0.1)


def test_two_normal_operands_add_their_noises() -> None:
    a, b = (torch.randn((256, 1024), generator=seeded(i)) for i in (0, 1))
    exact = torch.eye(1024)
    one = 10 ** (-errors(Drawn(a, exact, None, None), E4M3)[1] / 10)
    _, both = errors(Drawn(a, b, None, None), E4M3)
    assert both == pytest.approx(-10 * math.log10(2 * one), abs=0.15)
    assert both == pytest.approx(28.5, abs=0.3)


def test_the_maximum_of_the_whole_operand_sets_a_tensorwise_scale_alone() -> None:
    a, b = (torch.randn((32, 64), generator=seeded(i)) * 1e-3 for i in (0, 1))
    far = Drawn(a, b, 1e4, 1e4)
    near = Drawn(a, b, None, None)
    assert errors(far, TENSORWISE)[1] < errors(near, TENSORWISE)[1] - 3
    assert errors(far, E4M3) == errors(near, E4M3)
    static = (OperandRecipe(scaling=Scaling.TENSORWISE, range=Range.STATIC, amax=1e4),) * 2
    assert errors(near, static) == errors(far, TENSORWISE)
    with pytest.raises(InputError, match="needs an amax"):
        errors(near, (replace(static[0], amax=None), static[1]))


def test_degenerate_operands_give_documented_numbers() -> None:
    zeros, ones = torch.zeros(3, 4), torch.ones(2, 4)
    assert errors(Drawn(zeros, ones, None, None), E4M3) == (0.0, math.inf)
    for bad in (math.nan, math.inf):
        a = ones.clone()
        a[0, 0] = bad
        assert errors(Drawn(a, ones, None, None), E4M3) == (math.inf, -math.inf)
    huge = torch.full((2, 4), 3e38)
    assert errors(Drawn(huge, huge, None, None), E4M3) == (math.inf, -math.inf)


def test_a_site_of_zeros_is_safe_and_one_with_a_broken_weight_is_not() -> None:
    grad = torch.randn(100, 8, generator=seeded())
    weight = torch.randn(8, 16, generator=seeded(1))
    recipes = {Gemm.FPROP: (E4M3,)}
    for x, broken, verdict in (
        (torch.zeros(100, 16), weight, Verdict.SAFE),
        (torch.randn(100, 16, generator=seeded(2)), weight.index_fill(0, torch.tensor([0]), math.nan), Verdict.UNSAFE),
    ):
        (found,) = estimate_site(site(x, grad, broken), recipes, Budget(), 100, 0)
        assert found.verdict(Budget()) is verdict
        assert not math.isnan(found.mere.mean)
        assert not math.isnan(found.sqnr_db.low)


def test_sampling_stops_once_every_recipe_is_decided(heavy: SiteStats) -> None:
    sampler = CopulaSampler(heavy, 4096)
    clear = estimate(sampler, Gemm.FPROP, (E4M3, E5M2), Budget(mere=0.9, sqnr_db=5.0), seed=1)
    assert [found.draws for found in clear] == [4, 4]
    assert {found.verdict(Budget(mere=0.9, sqnr_db=5.0)) for found in clear} == {Verdict.SAFE}
    at = Budget(mere=0.9, sqnr_db=clear[0].sqnr_db.mean)
    close = estimate(sampler, Gemm.FPROP, (E4M3,), at, limit=16, seed=1)
    assert close[0].draws > 4
    for found in (*clear, *close):
        assert found.sqnr_db.low < found.sqnr_db.mean < found.sqnr_db.high
        assert 0 < found.mere.low < found.mere.mean < found.mere.high


def test_the_same_seed_gives_the_same_numbers_whatever_else_is_estimated(heavy: SiteStats) -> None:
    recipes = {gemm: candidates(gemm) for gemm in Gemm}
    all_three = estimate_site(heavy, recipes, Budget(), 512, 7, limit=4)
    torch.rand(3)  # the global generator does not matter
    alone = estimate_site(heavy, {Gemm.DGRAD: recipes[Gemm.DGRAD]}, Budget(), 512, 7, limit=4)
    assert tuple(found for found in all_three if found.gemm is Gemm.DGRAD) == alone
    assert estimate_site(heavy, {Gemm.DGRAD: recipes[Gemm.DGRAD]}, Budget(), 512, 8, limit=4) != alone
    assert seed_for(0, "a", Gemm.FPROP) != seed_for(0, "b", Gemm.FPROP)


def test_what_was_not_seen_has_no_estimate(heavy: SiteStats) -> None:
    recipes = dict.fromkeys(Gemm, (E4M3,))
    found = estimate_site(replace(heavy, grad_output=None), recipes, Budget(), 64, 0, limit=4)
    assert [one.gemm for one in found] == [Gemm.FPROP]
    assert estimate_site(heavy, {}, Budget(), 64, 0) == ()
    nothing = SiteStats("never", 8, 8, None, None, None, None)
    assert estimate_site(nothing, recipes, Budget(), 64, 0) == ()


def test_candidates_are_told_apart_and_named() -> None:
    for gemm in Gemm:
        pairs = candidates(gemm)
        assert len(set(pairs)) == len(pairs) == (6 if gemm is Gemm.FPROP else 8)
        assert len({recipe_label(gemm, pair) for pair in pairs}) == len(pairs)
        assert E4M3 in pairs
        assert TENSORWISE in pairs
        for pair in pairs:
            for operand, recipe in zip(OPERANDS[gemm], pair, strict=True):
                square = recipe.scaling is Scaling.BLOCKWISE_128X128
                assert operand is Operand.WEIGHT or not square
    assert recipe_label(Gemm.FPROP, E4M3) == "e4m3 rowwise"
    assert [recipe_label(gemm, candidates(gemm)[-1]) for gemm in Gemm] == [
        "e4m3 rowwise, scales powers of two",
        "grad_output e4m3 rowwise, scales powers of two, weight e4m3 transposed",
        "e4m3 transposed",
    ]
    mixed = (OperandRecipe(format=Format.E5M2), OperandRecipe())
    assert recipe_label(Gemm.DGRAD, mixed) == "grad_output e5m2 rowwise, weight e4m3 rowwise"
