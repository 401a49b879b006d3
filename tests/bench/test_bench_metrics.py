"""NE and AUC against closed forms and brute force."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.bench.quality.evaluation import auc, base_entropy, log_loss, normalised_entropy
from loka.errors import InputError


def auc_by_all_pairs(scores: list[float], target: list[int]) -> float:
    clicks = [s for s, t in zip(scores, target, strict=True) if t]
    others = [s for s, t in zip(scores, target, strict=True) if not t]
    wins = sum((c > o) + 0.5 * (c == o) for c in clicks for o in others)
    return wins / (len(clicks) * len(others))


def test_the_base_rate_has_a_normalised_entropy_of_one() -> None:
    target = torch.tensor([1.0, 0, 0, 0, 1, 0, 0, 0, 0, 0])
    logits = torch.full((10,), math.log(0.2 / 0.8))
    assert base_entropy(target) == pytest.approx(-0.2 * math.log(0.2) - 0.8 * math.log(0.8))
    assert normalised_entropy(logits, target) == pytest.approx(1.0, abs=1e-6)


def test_log_loss_is_that_of_the_probabilities() -> None:
    logits, target = torch.tensor([0.0, 2.0, -1.0]), torch.tensor([1.0, 0.0, 0.0])
    p = [1 / (1 + math.exp(-x)) for x in logits.tolist()]
    assert log_loss(logits, target) == pytest.approx(-(math.log(p[0]) + math.log(1 - p[1]) + math.log(1 - p[2])) / 3)


def test_extreme_logits_stay_finite() -> None:
    assert log_loss(torch.tensor([1e4, -1e4]), torch.tensor([0.0, 1.0])) == pytest.approx(1e4)


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(0, 1)), min_size=2, max_size=60))
def test_auc_equals_all_pairs_with_ties(rows: list[tuple[int, int]]) -> None:
    scores, target = [float(s) for s, _ in rows], [t for _, t in rows]
    if len(set(target)) == 2:
        expected = auc_by_all_pairs(scores, target)
        assert auc(torch.tensor(scores), torch.tensor(target)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("metric", [normalised_entropy, auc])
def test_rows_that_are_all_alike_are_refused(metric) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match="clicks and non-clicks"):
        metric(torch.zeros(3), torch.ones(3))


@pytest.mark.parametrize(
    ("scores", "target"),
    [
        (torch.zeros(3), torch.zeros(2)),
        (torch.zeros(3, 1), torch.zeros(3, 1)),
        (torch.zeros(0), torch.zeros(0)),
        (torch.zeros(2), torch.tensor([0.0, 0.5])),
    ],
)
def test_misshapen_input_is_refused(scores: torch.Tensor, target: torch.Tensor) -> None:
    with pytest.raises(InputError, match="must"):
        auc(scores, target)
