"""Student's t, intervals with infinite values, and how often repeated looks decide wrongly."""

from __future__ import annotations

import math

import pytest
import torch

from loka.errors import InputError
from loka.numerics.enums import Gemm
from loka.numerics.recipe import OperandRecipe
from loka.policy.settings import Budget
from loka.probe.estimate import confidence, decided, interval, looks, mere_interval, t_quantile
from loka.probe.profile.profile import Estimate, Verdict


@pytest.mark.parametrize(
    ("level", "degrees", "expected"),
    [
        (0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.975, 3, 3.18245), (0.995, 3, 5.84091), (0.975, 7, 2.36462),
        (0.995, 7, 3.49948), (0.975, 15, 2.13145), (0.975, 63, 1.99834), (0.975, 1000, 1.96234), (0.5, 5, 0.0),
    ],
)  # fmt: skip
def test_quantiles_of_t_are_those_of_the_tables(level: float, degrees: int, expected: float) -> None:
    assert t_quantile(level, degrees) == pytest.approx(expected, abs=1e-4)


def test_looks_double_up_to_the_limit() -> None:
    assert looks(64) == (4, 8, 16, 32, 64)
    assert looks(10) == (4, 8, 10)
    assert looks(2) == (2,)
    with pytest.raises(InputError, match="at least 2"):
        looks(1)


@pytest.mark.parametrize("limit", [2, 4, 5, 64, 1000])
def test_the_risk_of_all_looks_together_stays_below_five_percent(limit: int) -> None:
    risks = [(1 - confidence(look, limit)) / 2 for look in looks(limit)]
    assert sum(risks) <= 0.045 + 1e-12
    assert confidence(limit, limit) == pytest.approx(0.95)


def test_intervals_with_infinite_values_never_hold_nan() -> None:
    inf = math.inf
    assert interval([inf, inf]).low == inf
    assert interval([3.0, inf, 5.0]).mean == 4.0
    assert interval([3.0, -inf, inf]).high == -inf
    assert mere_interval([0.1, inf]).low == inf
    assert mere_interval([0.01, 0.3]).low == 0.0
    assert (interval([3.0]).low, interval([3.0]).high) == (-inf, inf)
    with pytest.raises(InputError, match="no values"):
        interval([])


def test_the_interval_holds_the_mean_nineteen_times_in_twenty() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn((2000, 6), generator=generator, dtype=torch.float64).tolist()
    held = sum(found.low <= 0 <= found.high for found in map(interval, draws))
    assert held / 2000 == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("side", [Verdict.SAFE, Verdict.UNSAFE])
def test_repeated_looks_decide_wrongly_at_most_one_time_in_twenty(side: Verdict) -> None:
    """The mean lies at the budget: deciding `side` is then wrong, or barely right, every time."""
    generator = torch.Generator().manual_seed(1)
    trials, limit, budget = 1500, 64, Budget(mere=1.0, sqnr_db=24.0)
    draws = (24.0 + torch.randn((trials, limit), generator=generator, dtype=torch.float64)).tolist()
    wrong = plain = 0
    for values in draws:
        wrong += _verdict(values, limit, budget, spend=True) is side
        plain += _verdict(values, limit, budget, spend=False) is side
    assert wrong / trials <= 0.05
    assert plain / trials > 0.05  # what looking again and again at 95 % would do


def _verdict(values: list[float], limit: int, budget: Budget, spend: bool) -> Verdict:
    """The verdict of one sequence of SQNRs, stopped as estimate() does."""
    for look in looks(limit):
        level = confidence(look, limit) if spend else 0.95
        if decided(_estimate(values[:look], level), budget):
            break
    return _estimate(values[:look], 0.95).verdict(budget)


def _estimate(values: list[float], level: float) -> Estimate:
    pair = (OperandRecipe(), OperandRecipe())
    return Estimate(Gemm.FPROP, pair, mere_interval([0.1] * len(values)), interval(values, level), len(values))
