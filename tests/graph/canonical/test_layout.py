"""Layouts say which elements of a value a tensor shows, as torch's views of `arange` do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod

import pytest
import torch
from torch import Tensor

from loka.graph.canonical.layout import (
    Dims,
    Move,
    Piece,
    Size,
    Step,
    merged,
    move,
    regrouped,
    rows_of,
    steps_along,
    translated,
)

SEEDS = range(40)


def sizes(*numbers: int) -> tuple[Size, ...]:
    """Sizes of one run."""
    return tuple((number,) for number in numbers)


def piece(size: int, stride: int) -> Piece:
    return Piece((size,), (stride,))


def step(size: int, stride: int, other: int) -> Step:
    return Step((size,), (stride,), (other,))


def shown(dims: Dims) -> Tensor:
    """The element numbers of a value that a tensor with these dimensions shows."""
    total = torch.zeros((), dtype=torch.long)
    for dim in dims:
        along = torch.zeros(1, dtype=torch.long)
        for each in dim:
            along = (along[:, None] + torch.arange(each.size[0]) * each.stride[0]).flatten()
        total = total[..., None] + along
    return total


def cut(number: int, chance: random.Random) -> list[int]:
    """A number as a product of others, some of them 1."""
    made = [1] if chance.random() < 0.2 else []
    while number > 1:
        factor = chance.choice([each for each in range(2, number + 1) if number % each == 0])
        made.insert(chance.randrange(len(made) + 1), factor)
        number //= factor
    return made or [1]


def viewed(tensor: Tensor, dims: Dims, chance: random.Random) -> tuple[Tensor, Dims]:
    """A tensor and its layout after a random permutation, then a reshape where that is a view."""
    order = chance.sample(range(tensor.dim()), tensor.dim())
    tensor, dims = tensor.permute(order), tuple(dims[each] for each in order)
    shape = [size for each in tensor.shape for size in cut(each, chance)]
    found = regrouped([each for dim in dims for each in dim], sizes(*shape))
    assert found is not None
    return tensor.reshape(shape), found


def random_view(chance: random.Random, count: int = 24) -> tuple[Tensor, Dims]:
    """A random view of `arange(count)`."""
    tensor, dims = torch.arange(count), rows_of(sizes(count))
    for _ in range(3):
        tensor, dims = viewed(tensor, dims, chance)
    return tensor, dims


def test_pieces_that_are_one_as_such_are_merged() -> None:
    assert merged([piece(3, 8), piece(1, 77), piece(2, 4), piece(4, 1)]) == (piece(24, 1),)
    assert merged([piece(2, 4), piece(3, 1)]) == (piece(2, 4), piece(3, 1))
    assert merged([piece(4, 1), piece(2, 4)]) == (piece(4, 1), piece(2, 4))  # another order of elements
    assert merged([Piece((3, 5), (8, 8)), Piece((8, 8), (1, 1))]) == (Piece((24, 40), (1, 1)),)
    assert merged([Piece((2, 2), (3, 5)), Piece((3, 3), (1, 1))]) == (Piece((2, 2), (3, 5)), Piece((3, 3), (1, 1)))


@pytest.mark.parametrize(("shape", "why"), [((3, 8), "cuts unevenly"), ((4, 3), "too few"), ((4, 12), "too many")])
def test_no_view_of_such_a_shape(shape: tuple[int, ...], why: str) -> None:
    assert regrouped([piece(4, 1), piece(6, 4)], sizes(*shape)) is None, why


def test_a_batch_is_cut_alike_in_each_run() -> None:
    rows = [Piece((15, 25), (4, 4)), Piece((4, 4), (1, 1))]
    batched = ((3, 5), (5, 5), (4, 4))
    assert regrouped(rows, batched) == ((Piece((3, 5), (20, 20)),), (Piece((5, 5), (4, 4)),), (Piece((4, 4), (1, 1)),))
    assert regrouped(rows, ((5, 5), (3, 6), (4, 4))) is None  # the second run has not as many


@pytest.mark.parametrize("seed", SEEDS)
def test_views_show_the_elements_that_torch_shows(seed: int) -> None:
    tensor, dims = random_view(random.Random(seed))
    assert torch.equal(shown(dims), tensor)


def test_no_steps_where_pieces_cannot_be_paired() -> None:
    rows = rows_of(sizes(6, 4))
    assert steps_along(((), (piece(4, 1),)), rows, sizes(6, 4)) is None  # the first itself is broadcast
    assert steps_along(((piece(2, 1), piece(3, 2)), ()), ((piece(3, 1), piece(2, 3)), ()), sizes(6, 1)) is None
    assert steps_along(rows, ((piece(3, 1),), (piece(4, 6),)), sizes(6, 4)) is None  # of another size


def along(steps: Sequence[Step], count: int) -> Tensor:
    """By its number, the element of the other value that each element of the first one is beside."""
    found = torch.full((count,), -1)
    own = shown(tuple((Piece(each.size, each.stride),) for each in steps)).flatten()
    found[own] = shown(tuple((Piece(each.size, each.other),) for each in steps)).flatten()
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_lead_from_each_element_to_the_one_beside_it(seed: int) -> None:
    chance = random.Random(seed)
    first, dims = random_view(chance)
    shape = list(first.shape)
    order = chance.sample(range(len(shape)), len(shape))  # the other has these dimensions in another order
    kept = [each for each in order if chance.random() < 0.7]
    strides = [0] * len(shape)
    for at, each in enumerate(kept):
        strides[each] = prod(shape[later] for later in kept[at + 1 :])
    other = tuple(merged([piece(n, s)]) if s else () for n, s in zip(shape, strides, strict=True))
    beside = torch.arange(prod(shape[each] for each in kept)).as_strided(shape, strides)
    steps = steps_along(dims, other, sizes(*shape))
    assert steps is not None
    assert torch.equal(along(steps, 24)[first.flatten()], beside.flatten())
    # Views of the first value are those of the other along the same elements.
    for wanted, theirs in zip(dims, other, strict=True):
        assert translated((wanted,), steps) == (theirs,)


def test_translated_to_what_is_broadcast() -> None:
    steps = (step(6, 4, 0), step(4, 1, 1))  # a vector beside a matrix (6, 4)
    assert translated(((piece(6, 4),), (piece(4, 1),)), steps) == ((), (piece(4, 1),))
    assert translated(((piece(24, 1),),), steps) is None  # broadcast in part


def test_nothing_is_translated_that_cuts_a_step_unevenly() -> None:
    assert translated(((piece(2, 3),),), (step(4, 3, 1), step(3, 1, 4))) == ((piece(2, 1),),)
    assert translated(((piece(4, 3),),), (step(3, 4, 1), step(4, 1, 3))) is None
    assert translated(((piece(2, 24),),), (step(24, 1, 1),)) is None  # beyond the value


def done(tensor: Tensor, found: Move) -> Tensor:
    """What a move makes of a tensor."""
    tensor = tensor if found.before is None else tensor.reshape([each[0] for each in found.before])
    tensor = tensor if found.order is None else tensor.permute(found.order)
    return tensor if found.after is None else tensor.reshape([each[0] for each in found.after])


def test_dimensions_of_which_none_divides_the_other_move_through_all_of_them() -> None:
    thirds, halves = rows_of(sizes(3, 8)), ((piece(12, 1),), (piece(2, 12),))
    assert move(thirds, halves, sizes(3, 8), sizes(12, 2)) == Move(sizes(2, 12), (1, 0), None)
    columns_first = ((piece(6, 1),), (piece(4, 6),))
    assert move(rows_of(sizes(6, 4)), columns_first, sizes(6, 4), sizes(6, 4)) == Move(sizes(4, 6), (1, 0), None)
    blocks = rows_of(sizes(3, 16))
    assert move(rows_of(sizes(16, 3)), blocks, sizes(16, 3), sizes(3, 16)) == Move(None, None, sizes(3, 16))


def test_no_move_to_other_elements() -> None:
    rows = rows_of(sizes(6, 4))
    assert move(rows, ((piece(3, 4),), (piece(4, 1),)), sizes(6, 4), sizes(3, 4)) is None


@pytest.mark.parametrize("seed", SEEDS)
def test_a_move_makes_one_view_of_another(seed: int) -> None:
    """Of powers of two, which cut each other evenly."""
    chance = random.Random(seed)
    (first, dims), (wanted, to) = random_view(chance, 32), random_view(chance, 32)
    found = move(dims, to, sizes(*first.shape), sizes(*wanted.shape))
    assert found is not None
    assert torch.equal(done(first, found), wanted)
