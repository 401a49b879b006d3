"""Activations in place are traced out of place where nobody can tell, and stay where somebody can."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.graph.equivalence import with_forward
from loka.graph.expression import writes
from loka.graph.ir import ForwardIR
from loka.graph.trace.examples import ModelInputs, capture_examples
from tests.support.as_written import as_written


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.linear(x))
        return out


class OfNorm(Body):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.linear(x) + x), inplace=True)


class OfActivation(Body):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(F.gelu(self.linear(x)))
        return out


class OfChild(Body):
    """The linear is not inlined."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.act(self.other(x)))
        return out

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 8)


class OfIdentity(Body):
    """What a child gives may be what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).detach()
        return self.act(self.other(y)) + y


class OfView(Body):
    """What is changed is a part of a tensor that is read later."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).detach()
        return self.act(y[:, :4]).sum() + y


class OfArgument(Body):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(x.detach()) + self.linear(x.detach())


class ByFunction(Body):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.linear(x))


class Masked(Body):
    """As scores of an attention are."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).masked_fill_(x > 0, -1.0)
        return out


class ByFunctionReadAgain(Body):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).detach() + 1
        return torch.relu_(y) + y


class ReadAgain(Body):
    """A later statement reads the changed tensor by its name before the change."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).detach() + 1
        return self.act(y) + y


def traced(body: nn.Module) -> ForwardIR:
    batches = {batch: ModelInputs((torch.randn(batch, 8),)) for batch in (4, 7)}
    examples = capture_examples(body, [""], batches)[""]
    inline = [name for name, _ in body.named_modules() if name not in ("", "other")]
    return as_written(body, "", examples, inline=inline, sites=["linear"])


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (Body(), 0),
        (OfNorm(), 0),
        (OfActivation(), 0),
        (OfChild(), 0),
        (OfIdentity(), 1),
        (OfView(), 1),
        (OfArgument(), 1),
        (ReadAgain(), 1),
        (ByFunction(), 0),
        (Masked(), 0),
        (ByFunctionReadAgain(), 1),
    ],
)
def test_what_stays_in_place(body: nn.Module, count: int) -> None:
    forward = traced(body)
    assert sum(writes(step.value) or step.op == "relu_" for step in forward.statements) == count
    assert not any("relu_" in step.text() for step in forward.statements if step.op == "relu")
    x = torch.randn(5, 8)
    assert torch.equal(with_forward(body, forward)(x.clone()), body(x.clone()))
