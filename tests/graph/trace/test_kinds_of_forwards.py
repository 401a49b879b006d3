"""Kinds of forwards at the door: each is the same function in calls and modes that planning did not see, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.errors import InputError
from loka.graph.equivalence import with_forward
from loka.graph.ir import ForwardIR, Refused
from loka.graph.trace.examples import ExampleCall, Examples
from loka.graph.trace.trace import trace_forward

WIDTH = 8


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)


class PlainTensor(Base):
    """A tensor that is neither Parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + self.offset


class ByTheModeOfAChild(Base):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x @ self.w, 0.5, self.drop.training) + F.dropout(x, 0.3, self.training)


class OfTables(Base):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "ab"})
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return torch.cat([tower(x) for _, tower in self.towers.items()], -1) @ self.w.repeat(2, 1)


class AsksForAnAttribute(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.w
        return y * 2 if hasattr(self, "w") and not hasattr(self, "missing") and callable(self.forward) else y


class NumberOrTensor(Base):
    def forward(self, x: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        y = x @ self.w
        return y * scale if isinstance(scale, Tensor) else y + scale


def closed_over(factor: float) -> Any:
    return lambda x: x * factor


class Closure(Base):
    def __init__(self) -> None:
        super().__init__()
        self.act = closed_over(3.0)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.act(x @ self.w)
        return made


def trace(module: nn.Module, **kwargs: Any) -> ForwardIR | Refused:
    calls = tuple(ExampleCall(rows, (torch.randn(rows, WIDTH),), kwargs) for rows in (5, 8))
    return trace_forward(module, "m", Examples("m", calls))


@pytest.mark.parametrize(
    "kind", [PlainTensor, ByTheModeOfAChild, OfTables, AsksForAnAttribute, NumberOrTensor, Closure]
)
def test_the_same_at_other_sizes_and_modes(kind: type[nn.Module]) -> None:
    module = kind()
    answer = trace(module)
    assert isinstance(answer, ForwardIR), answer
    for rows, training in ((1, True), (2, False), (7, True), (300, False)):
        x, made = torch.randn(rows, WIDTH), []
        for each in (module, with_forward(copy.deepcopy(module), answer)):
            each.train(training)
            for child in each.children():
                child.train(not training)
            torch.manual_seed(0)
            made.append(each(x))
        torch.testing.assert_close(*made)


def test_a_tensor_where_a_number_was_is_another_call() -> None:
    module = NumberOrTensor()
    x, scale = torch.randn(3, WIDTH), torch.full((WIDTH,), 2.0)
    planned = trace(module)
    assert isinstance(planned, ForwardIR), planned
    with pytest.raises(InputError):
        with_forward(copy.deepcopy(module), planned)(x, scale)
    planned = trace(module, scale=scale)
    assert isinstance(planned, ForwardIR), planned
    bound = with_forward(copy.deepcopy(module), planned)
    assert torch.equal(bound(x, scale), module(x, scale))
    with pytest.raises(InputError):
        bound(x, 2.0)
