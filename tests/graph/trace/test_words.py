"""Reasons of refusals are LoKA's words, with the place, whatever Python or torch said."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loka.graph.trace.fx_recording import fx_record, reason_of
from torch import Tensor, nn

from loka.graph.ir import CannotTraceError, ForwardIR, Refused
from loka.graph.trace.examples import ExampleCall, Examples, ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward

NUMBER = "Python needs a plain number where a traced value stands (compute this number in __init__, or by torch)"


class Settings:
    """An object that is no tensor."""


class Unwatched:
    """Calls a function from where its tests are not watched: they get traced values."""

    def __init__(self, run: Callable[[nn.Module, Any], object]) -> None:
        self._run = run

    def __call__(self, module: nn.Module, x: Tensor) -> object:
        return self._run(module, x)


class Traced(nn.Module):
    """Runs one function of its input."""

    def __init__(self, run: Callable[[nn.Module, Any], object]) -> None:
        super().__init__()
        self.linear, self.settings, self.run = nn.Linear(4, 4), Settings(), Unwatched(run)

    def forward(self, x: Tensor) -> object:
        return self.run(self, x)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda m, x: m.linear(x, m.settings), "an object of class Settings is passed to an operation or a child"),
        (lambda m, x: [m.linear(x) for _ in range(x.size(0))], NUMBER),
        (lambda m, x: x * float(x.sum()), NUMBER),
        (lambda m, x: [1, 2, 3][x.size(0)], NUMBER),
        (lambda m, x: {1: 2}[x.size(0)], "a tensor or a size is the key of a dict"),
        (lambda m, x: round(x.size(0)), NUMBER),
        (lambda m, x: torch.tensor(x.size(0)), "a new tensor is made of a traced value"),
        (lambda m, x: len(x), "len of a tensor"),
        (lambda m, x: m.missing, "its code does not run on traced values: it raises AttributeError ("),
    ],
)
def test_the_reason_says_what_to_do_and_where(run: Callable[[nn.Module, Any], object], reason: str) -> None:
    with pytest.raises(CannotTraceError) as refused:
        fx_record(Traced(run), frozenset(), ())
    assert str(refused.value).startswith(reason)
    assert " at test_words.py:" in str(refused.value)


class MakesAConstant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.as_tensor([1.0] * 4)


class CallsAPrivateFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch._C._nn.hardsigmoid(x)


def test_what_cannot_be_printed_has_its_place() -> None:
    with pytest.raises(CannotTraceError, match=r"makes a constant tensor, .* at test_words.py:\d+ 'return x"):
        fx_record(MakesAConstant(), frozenset(), ())
    examples = Examples("", tuple(ExampleCall(rows, (torch.randn(rows, 4),), {}) for rows in (2, 3)))
    refused = trace_forward(CallsAPrivateFunction(), "", examples)
    assert isinstance(refused, Refused)
    assert re.search(r"'hardsigmoid', which is no public function of torch at test_words.py:\d+ ", refused.reason)


def test_torch_warns_of_nothing_on_a_trial_batch(recwarn: pytest.WarningsRecorder) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4))
    (examples,) = capture_examples(
        module, [""], {rows: ModelInputs((torch.randn(rows, 4),)) for rows in (2, 3)}
    ).values()
    assert isinstance(trace_forward(module, "", examples, inline=["0", "1"], sites=["0"]), ForwardIR)
    assert not recwarn.list


class AsksWhetherItIsTraced(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch.fx._symbolic_trace.is_fx_tracing()
        return x


def test_torch_logs_nothing_of_a_model_that_asks_whether_it_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    log = torch.fx._symbolic_trace.log
    monkeypatch.setattr(log, "handle", lambda record: None if log.disabled else said.append(record.getMessage()))
    examples = Examples("", tuple(ExampleCall(rows, (torch.randn(rows, 4),), {}) for rows in (2, 3)))
    torch.fx._symbolic_trace.log.warning("heard")
    trace_forward(AsksWhetherItIsTraced(), "", examples)
    assert said == ["heard"]


def test_an_unknown_error_is_quoted() -> None:
    assert reason_of(ValueError("odd\nsecond line")) == (
        "its code does not run on traced values: it raises ValueError ('odd')"
    )
