"""Assignments into slices of a tensor are writes into views of it."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from loka.errors import InputError
from loka.graph.equivalence import with_forward
from loka.graph.ir import ForwardIR, Refused
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward


class Filled(nn.Module):
    """(B, 4, 8) -> (B, 6, 8): rows of x, and two sums of them."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.linear = nn.Parameter(torch.randn(2, 4)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], 6, 8)
        out[:, :4] = x
        out[:, 4:] = self.mix @ x
        return self.linear(out)


class InAnyOrder(Filled):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros((len(x), 6, x.size(2)), dtype=x.dtype, device=x.device)
        out[..., 4:6, :] = self.mix @ x
        out[..., 1:4, :] = x[:, 1:]
        out[..., 0, :] = x[:, 0]
        return self.linear(out)


class OfSizes(Filled):
    def forward(self, x: Tensor) -> Tensor:
        half = x.size(1) // 2
        out = torch.empty_like(x)
        out[:, half:] = self.mix @ x
        out[:, :half] = x[:, :half]
        return self.linear(out)


class Cloned(Filled):
    def forward(self, x: Tensor) -> Tensor:
        out = x.clone()
        out[:, :2] += self.mix @ x
        out[:, -2:] = out[:, -2:] * 2
        return self.linear(out)


class ClonedHalves(Filled):
    def forward(self, x: Tensor) -> Tensor:
        out = x.clone()
        out[:, :-2] += self.mix @ x
        out[:, -2:] = out[:, -2:] * 2
        return self.linear(out)


class InItsOwnDtype(Filled):
    """Under autocast the product is bfloat16, and what is returned stays float32."""

    def forward(self, x: Tensor) -> Tensor:
        product = self.mix @ x
        out = x.new_empty(x.shape[0], 4, 8)
        out[:, :2] = product
        out[:, 2:] = product
        return out


class WithAGap(Filled):
    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(x.shape[0], 7, 8)
        out[:, :4] = x
        out[:, 4:6] = self.mix @ x
        return self.linear(out)


class OfPlannedSize(Filled):
    """The last slice ends at a number, and the tensor of another call may go on."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[:, :2] = x[:, 2:]
        out[:, 2:4] = self.mix @ x
        return self.linear(out)


class Overlapping(Filled):
    def forward(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], 6, 8)
        out[:, :4] = x
        out[:, 2:] = x
        return self.linear(out)


class ReadAfterItsPart(Filled):
    def forward(self, x: Tensor) -> Tensor:
        out = x.clone()
        out[:, :2] = self.mix @ x
        out[:, 2:] = out[:, :2] * 2
        return self.linear(out)


class Twice(Filled):
    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(x.shape[0], 6, 8)
        out[:, :4] = x
        out[:, :4] = x * 2
        out[:, 4:] = self.mix @ x
        return self.linear(out)


class SumsInPlace(Filled):
    """`+=` into slices of a clone."""

    def forward(self, x: Tensor) -> Tensor:
        out = x.clone()
        out[:, :2] += self.mix @ x
        out[:, 2:] += self.mix @ x * 2
        return self.linear(out)


class ByViews(Filled):
    """Views of slices are written into."""

    def forward(self, x: Tensor) -> Tensor:
        out, mixed = x.clone(), self.mix @ x
        out.narrow(1, 0, 2).add_(mixed)
        last = torch.narrow(out, dim=1, start=2, length=2)
        last += mixed * 2
        return self.linear(out)


class CopiedByViews(Filled):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[:, :2].copy_(self.mix @ x)
        out.narrow(1, 2, 2).copy_(x[:, 2:])
        return self.linear(out)


class ReadByAView(Filled):
    def forward(self, x: Tensor) -> Tensor:
        out, mixed = x.clone(), self.mix @ x
        first = out[:, :2]
        first.add_(mixed)
        out[:, 2:] += mixed
        return self.linear(out) + first.sum()


class OfTwoDimensions(Filled):
    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(x.shape[0], 4, 8)
        out[:, :2, :4] = x[:, :2, :4]
        return self.linear(out)


class OfANumber(Filled):
    def forward(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], 5, 8)
        out[:, :4] = x
        out[:, 4:] = 1.0
        return self.linear(out)


class NotNew(Filled):
    def forward(self, x: Tensor) -> Tensor:
        out = x * 2
        out[:, :2] = self.mix @ x
        out[:, 2:] = x[:, 2:]
        return self.linear(out)


class OneForAll(Filled):
    """A value of one row for all samples: it is broadcast."""

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], 6, 8)
        out[:, :4] = x
        out[:, 4:] = self.mix @ x[:1]
        return self.linear(out)


def traced(kind: type[Filled]) -> ForwardIR | Refused:
    torch.manual_seed(0)
    model = kind()
    batches = {batch: ModelInputs((torch.randn(batch, 4, 8),)) for batch in (6, 9)}
    return trace_forward(model, "", capture_examples(model, [""], batches)[""])


def same(model: nn.Module, forward: ForwardIR) -> None:
    """At other sizes, in both modes, with and without autocast: outputs, and gradients."""
    bound = with_forward(copy.deepcopy(model), forward)
    for rows, training, autocast in itertools.product((1, 2, 7, 300), (True, False), (False, True)):
        x, made = torch.randn(rows, 4, 8), []
        for each in (model.train(training), bound.train(training)):
            each.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = each(x)
            y.float().square().mean().backward()
            made.append((y, *(p.grad for p in each.parameters() if p.grad is not None)))
        for a, b in zip(*made, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=2e-2 if autocast else 1e-4, atol=2e-2 if autocast else 1e-5)


def test_the_size_that_slices_fill_is_a_condition() -> None:
    forward = traced(OfPlannedSize)
    assert isinstance(forward, ForwardIR), forward
    with pytest.raises(InputError):
        with_forward(OfPlannedSize(), forward)(torch.randn(3, 5, 8))


@pytest.mark.parametrize(
    "kind",
    [
        *(Filled, InAnyOrder, OfSizes, ClonedHalves, InItsOwnDtype, SumsInPlace, ByViews, OfPlannedSize),
        *(CopiedByViews, WithAGap, Overlapping, Cloned, ReadAfterItsPart, ReadByAView, Twice),
        *(OfTwoDimensions, OfANumber, NotNew, OneForAll),
    ],
)
def test_assignments_compute_the_same(kind: type[Filled]) -> None:
    forward = traced(kind)
    assert isinstance(forward, ForwardIR), forward
    torch.manual_seed(0)
    same(kind(), forward)
