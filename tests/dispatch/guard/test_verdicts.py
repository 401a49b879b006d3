"""Judging figures: limits, chance, and drift."""

from __future__ import annotations

import math

import pytest

from loka.dispatch.guard.verdicts import DRIFT, ENOUGH, INPUT_GRADIENT, OUTPUT, Judge, Norms, Promise

WEIGHT = "gradient of weight"


@pytest.fixture
def judge():
    """Limits: 0.3 of an output, 0.36 of the gradient of an input, 0.5 of sums (not 1.08)."""
    return Judge(Promise(output=0.1, gradients=0.12), margin=3.0)


def judged(judge, figure, *values, own=1.0):
    """The verdicts of checks with these relative errors."""
    return [judge.judge({figure: Norms(value * own, own)}) for value in values]


def test_three_checks_in_a_row_over_the_limit(judge):
    assert judged(judge, OUTPUT, *[0.1] * ENOUGH) == [None] * ENOUGH
    assert judged(judge, OUTPUT, 0.31, 0.31, 0.29, 0.31, 0.31) == [None] * 5
    assert judge.in_doubt
    (verdict,) = judged(judge, OUTPUT, 0.31)
    assert (verdict.figure, verdict.value, verdict.limit) == (OUTPUT, pytest.approx(0.31), pytest.approx(0.3))
    assert verdict.reason == "its output differs by 0.31, over its limit of 0.3"


@pytest.mark.parametrize(("figure", "limit"), [(INPUT_GRADIENT, 0.36), (WEIGHT, 0.5)])
def test_gradients_have_the_limit_of_all_gemms_and_sums_a_wider_one(figure, limit, judge):
    assert judged(judge, figure, *[limit - 0.01] * 20) == [None] * 20
    assert not judge.in_doubt
    *_, verdict = judged(judge, figure, *[limit + 0.01] * 3)
    assert verdict.limit == pytest.approx(limit)


def test_a_larger_margin_widens_every_limit():
    judge = Judge(Promise(output=0.1, gradients=0.12), margin=6.0)
    assert judged(judge, WEIGHT, *[0.99] * 20) == [None] * 20
    assert judged(judge, OUTPUT, *[0.59] * 20) == [None] * 20


def test_a_figure_counts_only_after_some_checks_and_they_are_asked_for(judge):
    for verdict in judged(judge, WEIGHT, *[1.0] * (ENOUGH - 1)):
        assert verdict is None
        assert judge.in_doubt
    (verdict,) = judged(judge, WEIGHT, 1.0)
    assert verdict is not None


def test_a_gradient_that_cancels_in_one_batch_is_held_to_its_usual_size(judge):
    judged(judge, WEIGHT, *[0.1] * ENOUGH)
    (verdict,) = judged(judge, WEIGHT, 10.0, own=0.01)  # the same error as before, of a sum near zero
    assert verdict is None
    assert judge.errors[WEIGHT] < 0.2
    assert not judge.in_doubt


def test_values_that_are_not_finite_need_no_second_check(judge):
    verdict = judge.judge({OUTPUT: Norms(0.0, 1.0), WEIGHT: Norms(math.inf, 1.0)})
    assert (verdict.figure, verdict.value) == (WEIGHT, math.inf)
    assert judge.judge({WEIGHT: Norms(math.inf, math.inf)}) is None  # the model's own


def test_nothing_is_said_of_zeros(judge):
    assert judged(judge, OUTPUT, *[0.0] * 5, own=0.0) == [None] * 5
    assert judge.errors[OUTPUT] == 0.0


@pytest.mark.parametrize(("figure", "promise"), [(OUTPUT, 0.1), (INPUT_GRADIENT, 0.12), (WEIGHT, 0.36)])
def test_drift_is_told_by_the_median_of_the_last(figure, promise, judge):
    judged(judge, figure, *[promise / DRIFT] * 20)
    *first, verdict = judged(judge, figure, *[1.1 * promise] * 3)
    assert first == [None, None]
    assert (verdict.value, verdict.limit) == (pytest.approx(1.1 * promise), pytest.approx(promise))
    assert "drifts: it differs by" in verdict.reason


def test_what_has_drifted_does_not_become_usual(judge):
    judged(judge, OUTPUT, *[0.02] * 20)
    assert all(judged(judge, OUTPUT, *[0.15] * 100)[2:])


def test_drift_below_the_promise_is_no_drift(judge):
    assert judged(judge, OUTPUT, *[0.001] * 20, *[0.09] * 20) == [None] * 40


def test_a_gradient_that_gets_small_beside_its_error_has_not_drifted(judge):
    judged(judge, WEIGHT, *[0.02] * 20)
    assert judged(judge, WEIGHT, *[0.4] * 40, own=0.05) == [None] * 40
    assert judge.errors[WEIGHT] == pytest.approx(0.4)
