"""The sequential test of quality: its looks, verdicts, error rates, and what it says is still needed."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from loka.bench.quality.compare_quality import ERROR_RATE, QualityVerdict, judge, looks, pairs_needed


@pytest.mark.parametrize("planned", [2, 4, 5, 9, 16, 64, 75, 1000])
def test_looks_share_the_whole_error_rate_and_end_with_all_pairs(planned: int) -> None:
    found = looks(planned)
    assert sum(error for _, error in found) == pytest.approx(ERROR_RATE)
    assert found[-1][0] == planned
    assert [pairs for pairs, _ in found] == sorted({pairs for pairs, _ in found})
    assert [error for _, error in found] == sorted(error for _, error in found)


@pytest.mark.parametrize(
    ("percent", "verdict"),
    [
        ((0.010, 0.011, 0.012), QualityVerdict.PARITY),  # above zero, yet within what was allowed
        ((-0.5, -0.51, -0.52), QualityVerdict.PARITY),  # better
        ((0.30, 0.31, 0.29), QualityVerdict.LOST),
        ((0.04, 0.05, 0.06), QualityVerdict.UNDECIDED),  # worse, and not shown to be beyond the budget
        ((-0.2, 0.3, 0.1), QualityVerdict.UNDECIDED),
        ((0.0,), QualityVerdict.UNDECIDED),
    ],
)
def test_verdicts(percent: tuple[float, ...], verdict: QualityVerdict) -> None:
    assert judge(percent, 0.05, planned=3) is verdict


def test_only_looks_decide() -> None:
    clear = [0.3, 0.31, 0.29, 0.3, 0.32, 0.28, 0.3]
    assert judge(clear, 0.05, planned=32) is QualityVerdict.UNDECIDED  # the first look has 8
    assert judge([*clear, 0.3], 0.05, planned=32) is QualityVerdict.LOST
    # What comes after a look that has decided changes nothing: the verdict was given.
    assert judge([*clear, 0.3, *[-9.0] * 24], 0.05, planned=32) is QualityVerdict.LOST


@pytest.mark.parametrize("planned", [8, 32])
def test_each_wrong_verdict_is_as_rare_as_stated(planned: int) -> None:
    """At a mean of exactly the budget, both verdicts are wrong; each has to stay within 5 %."""
    rng = np.random.default_rng(7)
    trials = 4000
    found = Counter(judge(rng.normal(0.02, 0.05, planned).tolist(), 0.02, planned) for _ in range(trials))
    for verdict in (QualityVerdict.PARITY, QualityVerdict.LOST):
        rate = found[verdict] / trials
        assert 0.035 < rate < ERROR_RATE + 3 * math.sqrt(ERROR_RATE * (1 - ERROR_RATE) / trials), verdict


def test_the_pairs_needed_do_decide() -> None:
    differences = np.random.default_rng(3).normal(0.005, 0.05, 12).tolist()
    needed = pairs_needed(differences, 0.02)
    assert needed is not None
    scale = (np.arange(needed) % 2 * 2 - 1).astype(float)  # mean 0 or 1 / needed, spread about 1

    def as_many(pairs: int) -> list[float]:
        sign = scale[:pairs]
        around = (sign - sign.mean()) / sign.std(ddof=1)
        return list(np.mean(differences) + np.std(differences, ddof=1) * around)

    assert judge(as_many(needed), 0.02, needed) is not QualityVerdict.UNDECIDED
    assert judge(as_many(needed // 2), 0.02, needed // 2) is QualityVerdict.UNDECIDED


def test_what_no_number_of_pairs_decides_is_said() -> None:
    assert pairs_needed((0.02, 0.02), 0.02) is None
    assert pairs_needed((0.01, 0.03), 0.02) is None
    assert pairs_needed((0.01,), 0.02) is None
    assert pairs_needed((0.0199, -5.0, 5.0), 0.02) is None
