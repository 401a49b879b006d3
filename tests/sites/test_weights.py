"""Names of weights: Parameters, and matrices in Parameters of more dimensions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka.sites.weights import SiteWeight, copies_matrix, find_weight, leading_index, matrix_name, swaps_columns
from tests.support.models.product_models import ExpertCross


def test_a_name_finds_its_parameter_or_its_matrix() -> None:
    model = ExpertCross()
    assert find_weight(model, "gates.0.weight") == SiteWeight(model.gates[0].weight)
    found = find_weight(model, "down.1.0")  # a ParameterList of Parameters of three dimensions
    assert found is not None
    assert found.shape == (48, 32)
    assert torch.equal(found.value, model.down[1][0])
    assert find_weight(model, matrix_name("up", (1, 1))) == SiteWeight(model.up, (1, 1))


@pytest.mark.parametrize("name", ["down", "gates", "up.2", "up.0.0.0.0.0", "up.x", "nothing", "gates.0.bias", ""])
def test_other_names_find_nothing(name: str) -> None:
    assert find_weight(ExpertCross(), name) is None


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "index"),
    [
        ("getitem", (1,), {}, (1,)),
        ("getitem", (-1,), {}, (3,)),
        ("getitem", ((1, -2),), {}, (1, 3)),
        ("getitem", ((1, 2, 0),), {}, ()),  # a vector
        ("getitem", (slice(1),), {}, ()),
        ("getitem", ((1, slice(None)),), {}, ()),
        ("getitem", (True,), {}, ()),
        ("getitem", (4,), {}, ()),
        ("getitem", (torch.tensor(1),), {}, ()),
        ("select", (0, 2), {}, (2,)),
        ("select", (-4, 2), {}, (2,)),
        ("select", (0,), {"index": 2}, (2,)),
        ("select", (1, 2), {}, ()),
        ("narrow", (0, 2), {}, ()),
    ],
)
def test_leading_indices(op: str, args: tuple[object, ...], kwargs: dict[str, object], index: tuple[int, ...]) -> None:
    assert leading_index(op, args, kwargs, (4, 5, 6, 7)) == index


def test_a_parameter_of_two_dimensions_holds_no_matrices() -> None:
    assert leading_index("getitem", (0,), {}, nn.Parameter(torch.zeros(3, 4)).shape) == ()


@pytest.mark.parametrize(
    ("op", "args", "shape", "copies"),
    [
        ("unsqueeze", (0,), (8, 6), True),
        ("unsqueeze", (1,), (8, 6), False),
        ("getitem", (None,), (8, 6), True),
        ("getitem", ((None, slice(None), slice(None)),), (8, 6), True),
        ("getitem", ((slice(None), None),), (8, 6), False),
        ("expand", (5, -1, -1), (1, 8, 6), True),
        ("expand", ((5, 8, 6),), (8, 6), True),
        ("expand", (5, 8, 6), (1, 1, 6), False),  # its rows are copies too
        ("repeat", (5, 1, 1), (1, 8, 6), True),
        ("repeat", (5, 2, 1), (1, 8, 6), False),
    ],
)
def test_copies_of_a_matrix_for_each_sample(op: str, args: tuple[object, ...], shape: object, copies: bool) -> None:
    assert copies_matrix(op, args, shape) is copies  # type: ignore[arg-type]


def test_transposes_of_each_matrix() -> None:
    assert swaps_columns("transpose", (1, 2))
    assert swaps_columns("permute", ((0, 2, 1),))
    assert swaps_columns("mT", ())
    assert not swaps_columns("transpose", (0, 1))
    assert not swaps_columns("T", ())
