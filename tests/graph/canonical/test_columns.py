"""What is computed of columns is computed of rows where kernels take it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from loka.graph.equivalence import with_forward
from loka.graph.expression import PRODUCT, Ref
from loka.graph.ir import ForwardIR
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward
from tests.support.cross_layers import cross_layers

WIDTH, LOW = 12, 5


class Columns(nn.Module):
    """A cross layer of columns (B, WIDTH, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(LOW, WIDTH)), nn.Parameter(torch.randn(WIDTH, LOW))
        self.bias = nn.Parameter(torch.randn(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        x0 = x.unsqueeze(2)
        y = torch.matmul(self.up, torch.matmul(self.down, x0)) + self.bias
        return (x0 * y + x0).squeeze(2)


class Samples(Columns):
    """The same of columns that are samples, (WIDTH, B)."""

    def forward(self, x: Tensor) -> Tensor:
        x0 = x.t()
        y = self.up @ (self.down @ x0) + self.bias
        return (x0 * y + x0).t()


class InPlace(Columns):
    def forward(self, x: Tensor) -> Tensor:
        x0 = x.unsqueeze(2)
        y = torch.matmul(self.up, torch.matmul(self.down, x0)) + self.bias
        return x0.mul(y).add_(x0).squeeze(2)


class Stacked(Columns):
    """Parts of Parameters, and a product by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        x0 = x.view(-1, WIDTH, 1)
        y = torch.einsum("oi,bij->boj", self.up, torch.einsum("oi,bij->boj", self.down, x0)) + self.bias[1]
        return torch.addcmul(x0, x0, y).flatten(1)


class ReadAsColumns(Columns):
    """Something else reads a column, and a size of one."""

    def forward(self, x: Tensor) -> Tensor:
        x0 = x.unsqueeze(2)
        y = torch.matmul(self.up, torch.matmul(self.down, x0))
        out = (x0 * y + x0).view(y.shape[0], -1)
        return out + torch.cat([y, y], 2).sum(2)


class OfOthers(Columns):
    """A sum with a matrix that no column is as high as: nothing is of columns after it."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(self.up, torch.matmul(self.down, x.unsqueeze(2)))
        return (y + x.unsqueeze(1)).sum(2)


def traced(module: nn.Module) -> ForwardIR:
    inputs = {batch: ModelInputs((torch.randn(batch, WIDTH),), {}) for batch in (5, 8)}
    found = trace_forward(module, "", capture_examples(module, [""], inputs)[""], sites=("down", "up"))
    assert isinstance(found, ForwardIR), found
    return found


@pytest.mark.parametrize(
    ("kind", "crosses"), [(Columns, 1), (Samples, 1), (InPlace, 1), (Stacked, 1), (ReadAsColumns, 0), (OfOthers, 0)]
)
def test_gemms_are_linears_of_rows_and_the_forward_computes_the_same(kind: type[Columns], crosses: int) -> None:
    module = kind()
    forward = traced(module)
    linears = [step for step in forward.statements if step.call is not None]
    assert [(step.op, step.call and isinstance(step.call.x, Ref), step.call and step.call.out) for step in linears] == [
        ("linear", True, PRODUCT)
    ] * 2
    assert cross_layers(forward) == crosses
    x = torch.randn(6, WIDTH, requires_grad=True)
    parameters = [x, module.down, module.up]
    right, got = module(x), with_forward(copy.copy(module), forward)(x)
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)
    ours, theirs = (torch.autograd.grad(y.square().sum(), parameters) for y in (got, right))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)
