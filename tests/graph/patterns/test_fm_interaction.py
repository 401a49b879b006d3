"""Mixing layers: which statements of a forward are found to be one, and which are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from loka.graph.expression import PRODUCT
from loka.graph.ir import ForwardIR
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward

N, D, RANK, MADE = 12, 20, 4, 5


class Mixing(nn.Module):
    """The Parameters of a mixing layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = nn.Parameter(torch.randn(N, RANK))
        self.compress = nn.Parameter(torch.randn(MADE, N))


class Both(Mixing):
    def forward(self, x: Tensor) -> Tensor:
        made = torch.matmul(self.compress, x)
        pairs = torch.matmul(x, torch.matmul(x.transpose(1, 2), self.rank))
        return torch.cat([pairs.flatten(1), made.flatten(1)], 1)


class Pairs(Mixing):
    def forward(self, x: Tensor) -> Tensor:
        return x @ (x.mT @ self.rank)


class InnerReadTwice(Mixing):
    def forward(self, x: Tensor) -> Tensor:
        inner = torch.matmul(x.transpose(1, 2), self.rank)
        return torch.matmul(x, inner) + inner.sum()


class Computed(Mixing):
    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, torch.matmul(x.transpose(1, 2), self.rank * 2.0))


class ProjectedAgain(Mixing):
    """x^T @ rank is part of two products: the kernel keeps it to itself."""

    def forward(self, x: Tensor) -> Tensor:
        inner = x.mT @ self.rank
        return (x @ inner) @ inner.mT


class Channels(Mixing):
    """The embeddings are a view, which nothing but the layer reads."""

    def forward(self, channels: Tensor) -> Tensor:
        x = channels.mT
        return x @ (x.mT @ self.rank)


class OtherOperand(Mixing):
    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x + 1.0, torch.matmul(x.transpose(1, 2), self.rank))


class InPlace(Mixing):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(x, torch.matmul(x.transpose(1, 2), self.rank))
        return y.mul_(2.0)


def traced(kind: type[Mixing], sites: tuple[str, ...], shape: tuple[int, int] = (N, D)) -> ForwardIR:
    module = kind()
    inputs = {batch: ModelInputs((torch.randn(batch, *shape),), {}) for batch in (5, 8)}
    found = trace_forward(module, "", capture_examples(module, [""], inputs)[""], sites=sites)
    assert isinstance(found, ForwardIR), found
    return found


def test_products_and_sums_are_one_layer_where_the_first_of_them_stands() -> None:
    forward = traced(Both, ("rank", "compress"))
    (mix,) = forward.mixes
    texts = [statement.text() for statement in forward.statements]
    found = [texts[place].split(" = ")[1] for place in (*mix.skipped, mix.outer)]
    assert found[0] == "x.transpose(1, 2)"
    assert found[-1] == "torch.matmul(x, matmul_1)"
    assert mix.compress is not None
    assert mix.first == min(mix.places) == 0
    assert (mix.rank, mix.weights, mix.views) == ("self.rank", "self.compress", (PRODUCT, PRODUCT))
    assert mix.made == (mix.outer, mix.compress)
    assert (mix.x, mix.sizes) == ("x", (N, D, RANK, MADE))


@pytest.mark.parametrize("kind", [Pairs, InPlace])
def test_products_alone_are_one_too(kind: type[Mixing]) -> None:
    (mix,) = traced(kind, ("rank",)).mixes
    assert (mix.compress, mix.sizes) == (None, (N, D, RANK, 0))


@pytest.mark.parametrize(
    ("kind", "sites"),
    [
        (InnerReadTwice, ("rank",)),
        (ProjectedAgain, ("rank",)),
        (Computed, ()),
        (OtherOperand, ("rank",)),
    ],
)
def test_what_is_read_elsewhere_computed_or_changed_is_none(kind: type[Mixing], sites: tuple[str, ...]) -> None:
    assert traced(kind, sites).mixes == ()


def test_embeddings_that_are_a_view_stay_outside() -> None:
    forward = traced(Channels, ("rank",), (D, N))
    (mix,) = forward.mixes
    assert forward.statements[0].target == mix.x
    assert 0 not in mix.places
    assert mix.first == 1
    assert mix.sizes == (N, D, RANK, 0)
