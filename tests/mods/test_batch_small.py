"""batch_small on random modules: the same function, inputs read in place where they are slices of one tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.errors import LokaError
from loka.graph.equivalence import source
from loka.mods.rewriting import batched_linears
from loka.mods.rewriting.batched_linears import FEW, SHARED, Batch
from tests.support.models import forward_mods as zoo


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(18))
def test_random_towers_are_the_same_function(seed: int) -> None:
    torch.manual_seed(seed)
    body = zoo.Towers(seed)
    forward, sizes, shapes = zoo.traced(body, body.inputs)
    found, unchanged = batched_linears.find(forward, sizes, shapes)
    kinds = ("towers", "seconds") if body.deep else ("towers",)
    assert [sorted(batch.members) for batch in found] == [
        sorted(f"{kind}.{i}" for i in range(body.used)) for kind in kinds
    ], unchanged
    assert not unchanged
    assert (found[0].base is None) == (body.way == "list")
    for batch in found:
        forward = batch.rewritten(forward)
    assert not any(step.call for step in forward.statements)
    zoo.assert_same(body, forward, body.inputs)


class Features(nn.Module):
    """A projection for each of three features."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList([nn.Linear(8, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([F.relu(each(x[:, i])) for i, each in enumerate(self.projections)], 1)


BATCHED = """\
def forward(self, x):
    weights = torch.stack([self.projections[0].weight, self.projections[1].weight, self.projections[2].weight])
    biases = torch.stack([self.projections[0].bias, self.projections[1].bias, self.projections[2].bias])
    products = torch.baddbmm(biases.unsqueeze(1), x.transpose(0, 1), weights.transpose(1, 2))
    products_relu = torch.nn.functional.relu(products)
    transpose = products_relu.transpose(0, 1)
    stack = transpose.contiguous()
    return stack
"""


def inputs(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 3, 8),)


def test_the_text_reads_slices_in_place_and_takes_what_follows_of_the_whole() -> None:
    forward, sizes, shapes = zoo.traced(Features(), inputs)
    (batch,), _ = batched_linears.find(forward, sizes, shapes)
    assert batch.name == "projections.0+projections.1+projections.2"
    assert source(batch.rewritten(forward)) == BATCHED


class ReadTwice(Features):
    """What follows the projections is not alike, and comes between them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second, third = (each(x[:, i]) for i, each in enumerate(self.projections))
        return first.clamp_(min=0) + third, second


def test_what_follows_in_place_and_not_alike_is_no_obstacle() -> None:
    body = ReadTwice()
    forward, sizes, shapes = zoo.traced(body, inputs)
    (batch,), _ = batched_linears.find(forward, sizes, shapes)
    assert batch.members == ("projections.0", "projections.1", "projections.2")
    zoo.assert_same(body, batch.rewritten(forward), inputs)


class InPlace(Features):
    """An activation in place follows each."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.relu(each(x[:, i]), inplace=True) for i, each in enumerate(self.projections)], dim=-1)


def test_an_activation_in_place_that_follows_all_alike_is_no_obstacle() -> None:
    body = InPlace()
    forward, sizes, shapes = zoo.traced(body, inputs)
    (batch,), _ = batched_linears.find(forward, sizes, shapes)
    rewritten = batch.rewritten(forward)
    assert [step.text() for step in rewritten.statements[-2:]] == [
        "transpose = products_relu.transpose(0, 1)",
        "cat = transpose.flatten(1)",
    ]
    zoo.assert_same(body, rewritten, inputs)


class OneAfterAnother(Features):
    """Each projection reads what the one before made."""

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, 0]
        for each in self.projections:
            y = F.pad(each(y), (0, 4))
        return y


class Noisy(Features):
    """Random numbers are drawn between the projections, so that nothing may be moved over them."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([F.dropout(each(x[:, i]), 0.5) for i, each in enumerate(self.projections)], 1)


class Shared(Features):
    def forward(self, x: Tensor) -> Tensor:
        y = x[:, 0]
        return torch.stack([each(y) for each in self.projections], 1)


class OfThreeDimensions(Features):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([each(x * i) for i, each in enumerate(self.projections)], 1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (OneAfterAnother(), FEW),
        (Noisy(), "between the linears stands 'dropout', which cannot be moved behind them"),
        (Shared(), SHARED),
        (OfThreeDimensions(), "its input has not two dimensions, or has no one shape"),
    ],
)
def test_what_cannot_be_batched_says_why(body: nn.Module, reason: str) -> None:
    forward, sizes, shapes = zoo.traced(body, inputs)
    found, unchanged = batched_linears.find(forward, sizes, shapes)
    assert found == ()
    assert {each.reason for each in unchanged} == {reason}
    assert len(unchanged) == 3


class Levels(nn.Module):
    """A small MLP for each feature; `order` is in which the second linears read what the first made."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(8, 4) for _ in range(3)])
        self.second = nn.ModuleList([nn.Linear(4, 6, bias=False) for _ in order])
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        made = [F.silu(each(x[:, i])) for i, each in enumerate(self.first)]
        return torch.cat([each(made[i]) for i, each in zip(self.order, self.second, strict=True)], 1)


@pytest.mark.parametrize(("order", "stacked"), [((0, 1, 2), False), ((2, 1, 0), True)])
def test_a_second_level_reads_the_products_of_the_first_where_they_are(order: tuple[int, ...], stacked: bool) -> None:
    body = Levels(order)
    forward, sizes, shapes = zoo.traced(body, inputs)
    batches, _ = batched_linears.find(forward, sizes, shapes)
    assert [each.members[0] for each in batches] == ["first.0", "second.0"]
    for batch in batches:
        forward = batch.rewritten(forward)
    assert any(step.target.startswith("inputs") for step in forward.statements) == stacked
    zoo.assert_same(body, forward, inputs)


def test_a_batch_that_is_not_there_is_a_fault_of_ours() -> None:
    forward, _, _ = zoo.traced(Features(), inputs)
    with pytest.raises(LokaError, match="'some' does not stand in its forward"):
        Batch("some", ("a", "b", "c"), 8, 4, None).rewritten(forward)
