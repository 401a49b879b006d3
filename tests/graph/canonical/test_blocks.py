"""What is computed of blocks (B, f, d) is computed of rows where kernels take it."""

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

FIELDS, DIM, LOW = 4, 6, 5


class Blocks(nn.Module):
    """A cross layer of blocks (B, FIELDS, DIM)."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(FIELDS, DIM, LOW) / 5)
        self.up = nn.Parameter(torch.randn(FIELDS, DIM, LOW) / 5)
        self.bias = nn.Parameter(torch.randn(FIELDS, DIM))

    def low(self, x: Tensor) -> Tensor:
        return torch.einsum("bfd,fdr->br", x, self.down)

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.einsum("br,fdr->bfd", self.low(x), self.up) + self.bias) + x


class Reordered(Blocks):
    """Matrices whose rows, and whose columns, do not stand together; the product in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.Parameter(torch.randn(FIELDS, LOW, DIM) / 5) for _ in range(2))

    def low(self, x: Tensor) -> Tensor:
        return torch.einsum("frd,bfd->br", self.down, x)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(x, x, self.bias + torch.einsum("frd,br->bfd", self.up, self.low(x)))


class Flattened(Blocks):
    """Ends with rows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(1)


class ReadAsBlocks(Blocks):
    """Something else reads a block, and sums it with another."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("br,fdr->bfd", self.low(x), self.up) + self.bias
        return torch.cat([y + x, x], 1)


class Broadcast(Blocks):
    """A factor of fewer columns."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, :1] * torch.einsum("br,fdr->bfd", self.low(x), self.up) + x


KINDS = {Blocks: 1, Reordered: 1, Flattened: 1, ReadAsBlocks: 0, Broadcast: 0}


def traced(module: nn.Module) -> ForwardIR:
    inputs = {batch: ModelInputs((torch.randn(batch, FIELDS, DIM),), {}) for batch in (5, 8)}
    found = trace_forward(module, "", capture_examples(module, [""], inputs)[""], sites=("down", "up"))
    assert isinstance(found, ForwardIR), found
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_gemms_are_linears_of_rows_and_the_forward_computes_the_same(kind: type[Blocks]) -> None:
    module = kind()
    forward = traced(module)
    linears = [step for step in forward.statements if step.call is not None]
    assert [(step.op, step.call and isinstance(step.call.x, Ref), step.call and step.call.out) for step in linears] == [
        ("linear", True, PRODUCT)
    ] * 2
    assert cross_layers(forward) == KINDS[kind]
    x = torch.randn(6, FIELDS, DIM, requires_grad=True)
    parameters = [x, module.down, module.up]
    right, got = module(x), with_forward(copy.copy(module), forward)(x)
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)
    ours, theirs = (torch.autograd.grad(y.square().sum(), parameters) for y in (got, right))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)


class NormOfBlocks(nn.Module):
    """A norm over both dimensions of a block, whose rows alone are read; an idle flatten between two linears."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((FIELDS, DIM))
        self.first, self.second = nn.Linear(FIELDS * DIM, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(self.norm(x.tanh()).flatten(1))
        out: Tensor = self.second(y.flatten(1))
        return out


class NormReadAsBlocks(NormOfBlocks):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.tanh())
        out: Tensor = self.second(self.first(y.flatten(1))) * y.sum(2)
        return out


@pytest.mark.parametrize("kind", [NormOfBlocks, NormReadAsBlocks])
def test_a_norm_of_blocks_is_one_of_rows(kind: type[NormOfBlocks]) -> None:
    module = kind()
    inputs = {batch: ModelInputs((torch.randn(batch, FIELDS, DIM),), {}) for batch in (5, 8)}
    examples = capture_examples(module, [""], inputs)[""]
    forward = trace_forward(module, "", examples, inline=("norm",), sites=("first", "second"))
    assert isinstance(forward, ForwardIR), forward
    assert ["(24,)" in step.text() for step in forward.statements if step.op == "layer_norm"] == [True]
    last = [step for step in forward.statements if step.call is not None][-1]
    assert last.operands[0].text == "first"
    x = torch.randn(6, FIELDS, DIM)
    torch.testing.assert_close(with_forward(copy.copy(module), forward)(x), module(x), rtol=1e-4, atol=1e-4)
