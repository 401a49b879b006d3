"""Opposites of conditions, as Python."""

from __future__ import annotations

import pytest

from loka.graph.guards import any_fails, negated


@pytest.mark.parametrize(
    ("condition", "opposite"),
    [
        ("mask is None", "mask is not None"),
        ("mask is not None", "mask is None"),
        ("x.shape[1] % 8 == 0", "x.shape[1] % 8 != 0"),
        ("not x.shape[1] > 6", "x.shape[1] > 6"),
        ("x.shape[1] > 6", "not x.shape[1] > 6"),
        ("isinstance(x, torch.Tensor)", "not isinstance(x, torch.Tensor)"),
        ("keep", "not keep"),
    ],
)
def test_the_opposite_of_a_condition(condition: str, opposite: str) -> None:
    assert negated(condition) == opposite


def test_an_order_of_numbers_is_not_turned_around_for_there_are_nans() -> None:
    scale = float("nan")
    assert eval(negated("scale > 1.0"), {"scale": scale})  # noqa: S307


def test_one_condition_for_all() -> None:
    assert any_fails(["mask is None", "len(x.shape) == 3"]) == "mask is not None or len(x.shape) != 3"
