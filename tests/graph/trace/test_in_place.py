"""Sums in place: `y += x` keeps y's dtype and memory, as the model's own forward does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from loka.graph.equivalence import with_forward
from loka.graph.ir import Refused
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward
from tests.support.as_written import as_written


class Residual(nn.Module):
    """Under autocast the linear gives bfloat16, and x is float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y += x
        return y * 2


class OfABias(Residual):
    """Under autocast its gradient is added up in bfloat16, and out of place in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y += self.bias
        return y


class Products(Residual):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y *= x
        y -= self.other(x)
        y += x
        return y


class OfAPart(Residual):
    """The sum writes into a tensor that is read later."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        part = y[:, :4]
        part += x[:, :4]
        return y


class SameDtype(Residual):
    """Both are made by linears: a plain sum is the same."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y += self.other(x)
        return y


class OfSizes(Residual):
    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[1]
        width *= 2
        y = self.linear(x)
        y += x
        return torch.cat([y, y], 1).view(-1, width)


class Written(Residual):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).add_(x)
        return out


class OfArgument(Residual):
    """The caller sees the change."""

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        out: Tensor = self.linear(x)
        return out


@pytest.mark.parametrize(
    ("kind", "in_place", "casts"),
    [
        (Residual, 0, 1),
        (OfABias, 0, 1),
        (Products, 0, 3),
        (OfAPart, 1, 0),
        (SameDtype, 0, 1),
        (OfSizes, 0, 1),
        (Written, 0, 1),
        (OfArgument, 1, 0),
    ],
)
def test_a_sum_in_place_is_the_same_bit_for_bit(kind: type[nn.Module], in_place: int, casts: int) -> None:
    module = kind()
    batches = {batch: ModelInputs((torch.randn(batch, 8),)) for batch in (4, 7)}
    examples = capture_examples(module, [""], batches)[""]
    forward = as_written(module, "", examples, inline=["linear"], sites=["linear"])
    assert sum(step.op.endswith("_") for step in forward.statements) == in_place
    assert sum(step.op == "type_as" for step in forward.statements) == casts
    for autocast in (False, True):
        x = torch.randn(5, 8)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            bound = with_forward(kind(), forward)
            bound.load_state_dict(module.state_dict())
            inputs = x.clone(), x.clone()
            ours, theirs = module(inputs[0]), bound(inputs[1])
            assert torch.equal(theirs, ours)
            assert theirs.dtype == ours.dtype
            assert torch.equal(*inputs)


class OfASlice(Residual):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y[:, :4] = x[:, 4:]
        y[:, 4:] = x[:, :4]
        out: Tensor = self.linear(y)
        return out


class OfABuffer(Residual):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().sum(0))
        out: Tensor = self.linear(x)
        return out


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (OfAPart, "item.add_(item_1)"),
        (OfArgument, "x.add_(1)"),
        (OfABuffer, "self.seen.add_("),
    ],
)
def test_a_change_that_others_may_see_is_refused(kind: type[nn.Module], text: str) -> None:
    module = kind()
    batches = {batch: ModelInputs((torch.randn(batch, 8),)) for batch in (4, 7)}
    answer = trace_forward(module, "", capture_examples(module, [""], batches)[""], ["linear"], ["linear"])
    assert isinstance(answer, Refused)
    assert answer.reason.startswith(f"changes a tensor in place: {text}"), answer.reason


def test_an_assignment_into_a_tensor_is_refused() -> None:
    batches = {batch: ModelInputs((torch.randn(batch, 8),)) for batch in (4, 7)}
    module = OfASlice()
    answer = trace_forward(module, "", capture_examples(module, [""], batches)[""], ["linear"], ["linear"])
    assert isinstance(answer, Refused)
    assert answer.reason.startswith("assignment into a tensor at test_in_place.py:"), answer.reason
