"""Operands of generated functions, from a kernel's results to the backward."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from loka import dispatch
from loka.dispatch import Quantized


def tensors(count: int) -> list[Tensor]:
    return [torch.full((2,), float(number)) for number in range(count)]


def test_an_operand_is_made_of_the_first_three_results() -> None:
    results = tensors(5)
    operand, mean, rstd = Quantized.first(tuple(results))
    assert type(operand) is Quantized
    assert (operand.data, operand.scale, operand.scale_max) == tuple(results[:3])
    assert (mean, rstd) == tuple(results[3:])


def test_each_operand_takes_three_results() -> None:
    results = tensors(6)
    first, second = Quantized.each(results)
    assert type(first) is type(second) is Quantized
    assert (*first, *second) == tuple(results)


class Digits(torch.autograd.Function):
    """x + 1; the gradient has a digit for each tensor that backward got, which says which it was."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        data, scale, scale_max, *others = (x * number for number in range(2, 8))
        dispatch.save_for_backward(ctx, (x, others[0]), (Quantized(data, scale, scale_max), others[1]), (), others[2])
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x, first), (operand, second), nothing, third = dispatch.saved(ctx)
        found = grad * len(nothing)
        for place, tensor in enumerate((x, *operand, first, second, third)):
            found = found + grad * tensor * 10**place
        return found


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_saved_comes_back_in_its_form(compiled: bool) -> None:
    def step(x: Tensor) -> Tensor:
        y: Tensor = Digits.apply(x)
        return y.sum()

    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    run(x).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [7654321.0] * 3


def test_the_tensors_are_released_before_the_backward_ends() -> None:
    """As `saved_tensors` does, so that a chain can free them stage by stage."""

    class Watched(Digits):
        alive: tuple[bool, ...] = ()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (_, first), *others = dispatch.saved(ctx)
            kept = weakref.ref(first)
            del first, others
            Watched.alive = (kept() is not None,)
            return grad

    Watched.apply(torch.ones(3, requires_grad=True)).sum().backward()
    assert Watched.alive == (False,)
