"""Forwards in canonical form."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.graph.equivalence import source, with_forward
from loka.graph.ir import ForwardIR
from loka.graph.patterns.region import find_regions
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward


class ByHand(nn.Module):
    """Two linears, the first with its bias, norm and activation in other words."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 24)
        self.weight, self.shift = nn.Parameter(torch.rand(24)), nn.Parameter(torch.rand(24))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.first.weight.T + self.first.bias
        centred = h - h.mean(-1, keepdim=True)
        h = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * self.weight + self.shift
        h = h * torch.sigmoid(h)
        return torch.addcmul(h, h, torch.einsum("oi,bi->bo", self.second.weight, h))


SITES = ("first.weight", "second.weight")


def traced(module: nn.Module) -> ForwardIR:
    inputs = {batch: ModelInputs((torch.randn(batch, 16),), {}) for batch in (5, 8)}
    found = trace_forward(module, "", capture_examples(module, [""], inputs)[""], sites=SITES)
    assert isinstance(found, ForwardIR), found
    return found


def test_a_forward_has_its_regions_and_computes_the_same() -> None:
    module = ByHand()
    forward = traced(module)
    first, second = find_regions(forward, SITES)
    assert (first.ops, second.ops) == (("linear", "layer_norm", "silu"), ("linear", "mul", "add"))
    x = torch.randn(6, 16, requires_grad=True)
    right, got = module(x), with_forward(copy.deepcopy(module), forward)(x)
    torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        *(torch.autograd.grad(y.square().sum(), x)[0] for y in (got, right)), rtol=1e-4, atol=1e-4
    )


class Named(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.add(input=x, other=F.silu(x))


def test_a_forward_without_sites_is_canonical_too() -> None:
    inputs = {batch: ModelInputs((torch.randn(batch, 16),), {}) for batch in (5, 8)}
    found = trace_forward(Named(), "", capture_examples(Named(), [""], inputs)[""])
    assert isinstance(found, ForwardIR), found
    assert "other" not in source(found)


class Turned(nn.Module):
    """GEMMs, the first of a transposed input; it reads views that nothing else needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        turned = x.t()
        h = torch.relu((self.first.weight @ turned).t() + self.first.bias)
        h = torch.tensordot(h, self.second.weight, dims=([1], [1]))
        return h + turned.t()[:, :1]


def test_gemms_of_transposed_inputs_are_linears() -> None:
    forward = traced(Turned())
    assert [step.text() for step in forward.statements if step.call is not None] == [
        "add = torch.nn.functional.linear(x, self.first.weight, self.first.bias)",
        "tensordot = torch.nn.functional.linear(relu, self.second.weight)",
    ]


class FoldedHeads(nn.Module):
    """Attention of the first token over all, with heads folded into the batch: one step of it in the keys is two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def fold(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1, 4, 4).transpose(1, 2).reshape(len(x) * 4, -1, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.fold(self.first(x[:, :1])), self.fold(self.second(x))
        return (q @ k.transpose(1, 2)).reshape(len(x), -1)


def test_a_batch_that_is_one_step_in_one_operand_and_two_in_the_other() -> None:
    inputs = {batch: ModelInputs((torch.randn(batch, 3, 16),), {}) for batch in (5, 8)}
    module = FoldedHeads()
    answer = trace_forward(module, "", capture_examples(module, [""], inputs)[""], ("first", "second"), ("first",))
    assert isinstance(answer, ForwardIR), answer
    x = torch.randn(7, 3, 16)
    torch.testing.assert_close(with_forward(copy.deepcopy(module), answer)(x), module(x))
