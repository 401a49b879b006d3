"""Positions, ticks and paths of charts."""

from __future__ import annotations

import math

import pytest

from loka.bench.report.geometry import axis_of, band, label, line, percent


def test_a_value_is_placed_between_the_ends_and_never_beyond() -> None:
    axis = axis_of(0.0, 0.25)
    assert [axis.at(value) for value in (0.0, 0.05, 0.25)] == [0.0, 20.0, 100.0]
    assert [axis.at(value) for value in (-1.0, 7.0, math.inf, -math.inf, math.nan)] == [0.0, 100.0, 100.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 0.27, (0.0, 0.1, 0.2)),
        (24.0, 42.0, (25.0, 30.0, 35.0, 40.0)),
        (-0.11, 0.008, (-0.1, -0.05, 0.0)),
        (0.0, 81920.0, (0.0, 25000.0, 50000.0, 75000.0)),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, ticks: tuple[float, ...]) -> None:
    assert axis_of(low, high).ticks == pytest.approx(ticks)


@pytest.mark.parametrize("value", [0.0, 3.0, -1e-7, 1e12])
def test_an_axis_without_a_width_is_widened(value: float) -> None:
    axis = axis_of(value, value)
    assert axis.low < value < axis.high
    assert axis.at(value) == 50.0


def test_labels_have_the_decimals_that_tell_ticks_apart() -> None:
    assert [label(value, (0.0, 0.025, 0.05)) for value in (0.0, 0.025, 0.05)] == ["0.000", "0.025", "0.050"]
    assert label(25000.0, (0.0, 25000.0)) == "25000"
    assert label(2.0, (2.0,)) == "2"


def test_paths() -> None:
    assert line([(0.0, 100.0), (50.0, 12.3456), (100.0, 0.0)]) == "M0.00,100.00 L50.00,12.35 L100.00,0.00"
    assert band([(0.0, 1.0), (9.0, 2.0)], [(0.0, 3.0), (9.0, 4.0)]) == "M0.00,1.00 L9.00,2.00 L9.00,4.00 L0.00,3.00 Z"
    assert (line([]), band([], [])) == ("", "")


def test_a_percentage_has_two_decimals_and_no_minus_zero() -> None:
    assert percent(1 / 3) == 33.33
    assert str(percent(-0.0)) == "0.0"
