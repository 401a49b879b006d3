"""Casts that change no dtype, with and without autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from loka.graph.canonical.forwards import as_traced
from loka.graph.ir import ForwardIR
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.observed_shapes import idle_casts
from loka.graph.trace.trace import trace_forward


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The product has the dtype of x, and so has the sum."""
        out: Tensor = self.linear(x).mul(x).add_(x)
        return out


class Narrows(Body):
    def forward(self, x: Tensor) -> Tensor:
        """Under autocast the linear's product is narrower than x, and what is added to it stays so."""
        out: Tensor = self.linear(x).add_(x)
        return out


class RaisesUnderAutocast(Body):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tensordot(self.linear(x), x, dims=([0], [0])).mul(x[:1]).add_(x[:1])
        return out


@pytest.mark.parametrize(("kind", "idle"), [(Body, 1), (Narrows, 0), (RaisesUnderAutocast, 1)])
def test_casts_that_change_nothing(kind: type[Body], idle: int) -> None:
    module = kind()
    batches = {batch: ModelInputs((torch.randn(batch, 8),)) for batch in (3, 5)}
    examples = capture_examples(module, [""], batches)[""]
    forward = trace_forward(module, "", examples, inline=["linear"], sites=["linear"])
    assert isinstance(forward, ForwardIR), forward
    assert sum(step.op == "type_as" for step in forward.statements) == 1 - idle
    back = as_traced(forward, frozenset())
    assert len(idle_casts(back, examples, kind)) == idle
