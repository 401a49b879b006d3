"""What is computed of (1, B, d), by Parameters (1, K, N), is computed of rows."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from loka.graph.equivalence import with_forward
from loka.graph.expression import PRODUCT
from loka.graph.ir import ForwardIR
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward
from tests.support.cross_layers import cross_layers

WIDTH, LOW = 6, 4


class Expert(nn.Module):
    """A cross layer of one expert."""

    def __init__(self, experts: int = 1) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(experts, WIDTH, LOW) / 3)
        self.up = nn.Parameter(torch.randn(experts, LOW, WIDTH) / 3)
        self.bias = nn.Parameter(torch.randn(experts, 1, WIDTH))

    def lifted(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0).expand(len(self.down), -1, -1)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.bmm(self.lifted(x), self.down)
        return torch.addcmul(x, x, torch.baddbmm(self.bias, low, self.up).sum(0))


class Activated(Expert):
    """An activation between the products, another bias, and a mean over the experts."""

    def forward(self, x: Tensor) -> Tensor:
        low = torch.tanh(self.lifted(x) @ self.down)
        y: Tensor = x * (low.matmul(self.up) + self.bias).mean(0) + x
        return y


class Lifted(Expert):
    """The expert's tensor goes on, and its first row is read."""

    def forward(self, x: Tensor) -> Tensor:
        low = torch.bmm(self.lifted(x), self.down)
        y = torch.bmm(low, self.up)
        return x * y.squeeze(0) + x + y[0] * y.sum()


class OverRows(Expert):
    """A sum over the rows of the batch, not over the experts."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.bmm(torch.bmm(self.lifted(x), self.down), self.up)
        return x * y.sum(1) + x


KINDS = {Expert: 1, Activated: 1, Lifted: 0, OverRows: 0}


def traced(module: nn.Module) -> ForwardIR:
    inputs = {batch: ModelInputs((torch.randn(batch, WIDTH),), {}) for batch in (5, 8)}
    found = trace_forward(module, "", capture_examples(module, [""], inputs)[""], sites=("down", "up"))
    assert isinstance(found, ForwardIR), found
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_gemms_are_linears_of_rows_and_the_forward_computes_the_same(kind: type[Expert]) -> None:
    module = kind()
    forward = traced(module)
    linears = [step for step in forward.statements if step.call is not None]
    assert [(step.op, step.call and step.call.out) for step in linears] == [("linear", PRODUCT)] * 2
    assert linears[0].operands[0].text == "x"
    assert not any(step.op in ("unsqueeze", "expand") for step in forward.statements[:1])
    assert cross_layers(forward) == KINDS[kind]
    x = torch.randn(7, WIDTH, requires_grad=True)
    wanted = [x, module.down, module.up]
    right, got = module(x), with_forward(copy.copy(module), forward)(x)
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)
    ours, theirs = (torch.autograd.grad(y.square().sum(), wanted) for y in (got, right))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)
