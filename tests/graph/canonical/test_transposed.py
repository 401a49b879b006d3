"""Sums and concatenations that are kept as (B, d, n) are those of rows, and go back to what was traced."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from loka.graph.equivalence import with_forward
from loka.graph.ir import ForwardIR
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward

N, DIM, RANK = 8, 6, 3


class Features(nn.Module):
    """A mixing layer and a join of x (B, DIM, N)."""

    def __init__(self) -> None:
        super().__init__()
        self.to_rank = nn.Linear(N, RANK, bias=False)
        self.compress = nn.Linear(N, N // 2, bias=False)
        self.net = nn.Linear(N * RANK, N // 2 * DIM)
        self.norm = nn.LayerNorm(DIM)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        products = torch.matmul(x.transpose(1, 2), self.to_rank(x))
        return self.net(products.flatten(1)).view(-1, N // 2, DIM).transpose(1, 2), self.compress(x)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat(self.parts(x), dim=2) + x
        out: Tensor = self.norm(y.transpose(1, 2)).transpose(1, 2)
        return out


class Contiguous(Features):
    """Copies where it transposes; the residual first, and one transpose of x for all."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 1)
        products = rows @ self.to_rank(x)
        made = self.net(products.flatten(1)).view(-1, N // 2, DIM).mT.contiguous()
        y = torch.add(x, torch.concat((made, self.compress(x)), -1)).swapaxes(-1, -2).contiguous()
        out: Tensor = self.norm(y).movedim(1, 2).contiguous()
        return out


class ReadAsFeatures(Features):
    """Something else reads the sum."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat(self.parts(x), dim=2) + x
        return self.norm(y.transpose(1, 2)).transpose(1, 2) * y


class OfWeights(Features):
    """A sum of transposes with a Parameter as long as the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat(self.parts(x), dim=2) * self.net.bias[:N]
        out: Tensor = self.norm(y.transpose(1, 2))
        return out


# Mixing layers and joins. What else reads the sum, and the product with the Parameter, end the join alone.
BOUND = {Features: (1, 1), Contiguous: (1, 1), ReadAsFeatures: (1, 0), OfWeights: (1, 0)}


def traced(module: nn.Module) -> ForwardIR:
    inputs = {batch: ModelInputs((torch.randn(batch, DIM, N),), {}) for batch in (5, 7)}
    examples = capture_examples(module, [""], inputs)[""]
    found = trace_forward(module, "", examples, inline=("norm",), sites=("to_rank", "compress", "net"))
    assert isinstance(found, ForwardIR), found
    return found


@pytest.mark.parametrize("kind", BOUND)
def test_one_tensor_of_rows_is_mixed_and_joined(kind: type[Features]) -> None:
    forward = traced(kind())
    assert (len(forward.mixes), len(forward.joins)) == BOUND[kind]
    for mix in forward.mixes:
        assert (mix.sizes, mix.weights) == ((N, DIM, RANK, N // 2), "self.compress.weight")
    for mix, join in zip(forward.mixes, forward.joins, strict=False):
        assert join.residual is not None
        assert join.residual.text == mix.x  # the kernels hand it on
        assert join.rows == (N // 2, N // 2)


@pytest.mark.parametrize("kind", BOUND)
def test_it_computes_the_same(kind: type[Features]) -> None:
    module = kind()
    forward = traced(module)
    x = torch.randn(4, DIM, N)
    right = module(x.clone())
    torch.testing.assert_close(with_forward(copy.copy(module), forward)(x.clone()), right, rtol=1e-4, atol=1e-4)


def test_gradients_are_the_same() -> None:
    module = Features()
    x = torch.randn(4, DIM, N, requires_grad=True)
    wanted = [x, *module.parameters()]
    results = (module(x), with_forward(copy.copy(module), traced(module))(x))
    right, got = (torch.autograd.grad(y.square().sum(), wanted) for y in results)
    torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-3)
