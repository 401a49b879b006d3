"""Cross layers: which statements of a forward are found to be one, and which are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from loka.graph.ir import ForwardIR
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward

N = 24


class Layer(nn.Module):
    """A linear whose product a cross layer multiplies and adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(N, N)
        self.weight, self.bias = nn.Parameter(torch.randn(N, N)), nn.Parameter(torch.randn(N))


class Plain(Layer):
    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return x0 * self.linear(x) + x


class Transposed(Layer):
    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return x + self.linear(x) * x0


class Functions(Layer):
    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return torch.add(torch.mul(x0, self.linear(x)), x)


class Addcmul(Layer):
    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return torch.addcmul(x, x0, self.linear(x))


class First(Layer):
    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return x0 * self.linear(x0) + x0 + x


class OnParameters(Layer):
    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return x0 * (nn.functional.linear(x, self.weight) + self.bias) + x


class ReadTwice(Layer):
    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        product = self.linear(x)
        return x0 * product + x + product


class NoProduct(Layer):
    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return self.linear(x0 * x.relu() + x)


class Broadcast(Layer):
    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return x0[:, :1] * self.linear(x) + x


class Scaled(Layer):
    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return torch.add(x0 * self.linear(x), x, alpha=2)


class ThreeDimensions(Layer):
    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        a, b = x0.unflatten(0, (-1, 1)), x.unflatten(0, (-1, 1))
        return (a * self.linear(b) + b).flatten(0, 1)


class BroadcastInFront(Layer):
    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return x0 * self.linear(x.unflatten(0, (-1, 1))) + x


class InPlace(Layer):
    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return (x0 * self.linear(x) + x).clamp_(-1, 1)


def traced(kind: type[Layer]) -> ForwardIR:
    module = kind()
    batches = {batch: ModelInputs((torch.randn(batch, N), torch.randn(batch, N)), {}) for batch in (5, 8)}
    examples = capture_examples(module, [""], batches)[""]
    sites = ["weight"] if kind is OnParameters else ["linear"]
    found = trace_forward(module, "", examples, sites=sites)
    assert isinstance(found, ForwardIR), found
    return found


@pytest.mark.parametrize("kind", [Plain, Transposed, Functions, Addcmul, First])
def test_the_bias_the_factor_and_the_residual_are_found(kind: type[Layer]) -> None:
    forward = traced(kind)
    (cross,) = forward.crosses
    assert (cross.factor.text, cross.width) == ("x0", N)
    assert cross.residual.text == ("x0" if kind is First else "x")
    assert cross.bias is not None
    assert cross.bias.text == "self.linear.bias"
    assert forward.statements[cross.linear].target == cross.product
    assert set(cross.places) == {cross.sum, *cross.skipped}


def test_a_bias_that_a_statement_of_its_own_adds_is_the_gemm_s() -> None:
    forward = traced(OnParameters)
    (cross,) = forward.crosses
    assert cross.bias is not None
    assert cross.bias.text == "self.bias"
    call = forward.statements[cross.linear].call
    assert call is not None
    assert call.site == "weight"
    assert cross.product == forward.statements[cross.linear].target


def test_rows_of_any_number_of_dimensions() -> None:
    forward = traced(ThreeDimensions)
    (cross,) = forward.crosses
    assert (cross.factor.text, cross.width) == ("x0", N)


@pytest.mark.parametrize("kind", [ReadTwice, NoProduct, Broadcast, BroadcastInFront, Scaled, InPlace])
def test_other_sums_are_none(kind: type[Layer]) -> None:
    assert traced(kind).crosses == ()
