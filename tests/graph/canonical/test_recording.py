"""A child that stays a call may change what it is given in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from loka.graph.equivalence import with_forward
from loka.graph.ir import ForwardIR, Refused
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward


class Child(nn.Module):
    """An activation in place, with a buffer of its own that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.relu_()


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.child = nn.Linear(8, 8), Child()

    def forward(self, x: Tensor) -> Tensor:
        made = torch.add(input=self.child(self.linear(x)), other=x)
        return torch.add(input=made, other=x)


class PassedOn(Body):
    """The child returns what it was given; another child of the same name may not."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Identity()  # type: ignore[assignment]


class ReadAfterwards(Body):
    """The linear's result is the child's after the call."""

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x)
        return torch.add(input=self.child(made), other=made)


def answered(module: nn.Module) -> ForwardIR | Refused:
    batches = {batch: ModelInputs((torch.randn(batch, 8),)) for batch in (3, 5)}
    examples = capture_examples(module, [""], batches)[""]
    return trace_forward(module, "", examples, inline=["linear"], sites=["linear.weight"])


def test_what_the_child_returns_is_not_what_it_was_given() -> None:
    module = PassedOn()
    forward = answered(module)
    assert isinstance(forward, ForwardIR), forward
    call = next(step for step in forward.statements if step.op == "module")
    first_sum = next(step for step in forward.statements if step.op == "add")
    assert call.target in {ref.text for ref in first_sum.operands}
    x = torch.randn(4, 8)
    torch.testing.assert_close(with_forward(module, forward)(x), module(x))


@pytest.mark.parametrize("kind", [Body, ReadAfterwards])
def test_a_child_that_changes_what_it_is_given_is_refused(kind: type[Body]) -> None:
    answer = answered(kind())
    assert isinstance(answer, Refused)
    assert answer.reason.startswith("changes a tensor in place: self.child(linear) at test_recording.py:")
