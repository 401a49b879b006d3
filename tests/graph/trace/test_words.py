"""Reasons of refusals are LoKA's words, with the place, whatever Python or torch said."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loka.graph.ir import ForwardIR, Refused
from loka.graph.trace.examples import ExampleCall, Examples, ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward


class CallsAPrivateFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch._C._nn.hardsigmoid(x)


def test_what_cannot_be_printed_has_its_place() -> None:
    examples = Examples("", tuple(ExampleCall(rows, (torch.randn(rows, 4),), {}) for rows in (2, 3)))
    refused = trace_forward(CallsAPrivateFunction(), "", examples)
    assert isinstance(refused, Refused)
    assert re.search(r"'hardsigmoid', which is no public function of torch at test_words.py:\d+ ", refused.reason)


class Runs(nn.Module):
    """One function of its input."""

    def __init__(self, run: Callable[[nn.Module, Any], object]) -> None:
        super().__init__()
        self.linear, self.settings, self.run = nn.Linear(4, 4), object(), run

    def forward(self, x: Tensor) -> object:
        return self.run(self, x)


def outside(m: Any, x: Tensor) -> Tensor:
    return x + OUTSIDE


OUTSIDE = torch.ones(4)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda m, x: [m.linear(x) for _ in range(x.size(0))], "depends on the number of rows: x.shape[0] == "),
        (lambda m, x: [1, 2, 3, 4][x.size(0)], "depends on the number of rows: x.shape[0] == "),
        (lambda m, x: {2: x, 3: x}[x.size(0)], "depends on the number of rows: x.shape[0] == "),
        (lambda m, x: m.missing, "'Runs' object has no attribute 'missing'"),
        (outside, "reads the global OUTSIDE"),
    ],
)
def test_the_reason_says_why(run: Callable[[nn.Module, Any], object], reason: str) -> None:
    examples = Examples("", tuple(ExampleCall(rows, (torch.randn(rows, 4),), {}) for rows in (2, 3)))
    refused = trace_forward(Runs(run), "", examples)
    assert isinstance(refused, Refused), refused
    assert reason in refused.reason


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
