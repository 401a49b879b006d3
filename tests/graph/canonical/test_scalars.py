"""Numbers that a later call may have otherwise are read in each call, whatever they were when the forward was seen."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loka.errors import InputError
from loka.graph.equivalence import with_forward
from loka.graph.ir import ForwardIR
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward

WIDTH = 6
MODEL = """\
import math
import torch
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.f = nn.Linear(6, 6), nn.LayerNorm(6), 1.0

    def forward(self, x, k=None):
        h = self.linear(x)
        return {body}
"""


@dataclass(frozen=True)
class Case:
    """What a forward computes, with the attribute `f` and the argument `k` as planned and as they are later."""

    body: str
    f: tuple[float, float] = (1.0, 1.0)
    k: tuple[Any, Any] = (None, None)
    batch: int = 4


CASES = [
    Case("F.silu(F.layer_norm(h, self.norm.weight.shape, self.norm.weight, self.norm.bias))"),
    Case("F.silu(h * k)", k=(1, 3)),
    Case("F.relu(h[:, :k])", k=(4, 3)),
    Case("F.relu(h.view(-1, k))", k=(3, 2)),
    Case("F.silu(h * (x.size(0) // 5))", batch=30),
    Case("F.silu(h + x.shape[0] // 9)", batch=30),
    Case("F.silu(self.norm(h)[:9])", batch=30),
    Case("F.silu(self.norm(h)[-9:])", batch=30),
    Case("F.silu(self.norm(h).narrow(0, 0, x.size(0) // 5))", batch=30),
    Case("F.silu(self.norm(h).squeeze(0))", batch=1),
    Case("F.silu(self.norm(h).squeeze((0,)))", batch=1),
]
FLOATS = [  # each is a condition of the call
    Case("F.silu(h * self.f)", f=(1.0, 0.5)),
    Case("F.silu(h + self.f)", f=(0.0, 0.5)),
    Case("self.norm(h + self.f * x)", f=(1.0, 0.5)),
    Case("torch.add(h, x, alpha=self.f)", f=(1.0, 0.3)),
    Case("torch.addcmul(x, x, h, value=self.f)", f=(1.0, 0.5)),
    Case("F.leaky_relu(h, self.f)", f=(0.0, 0.3)),
    Case("h.clamp(min=self.f)", f=(0.0, 0.3)),
    Case("h * torch.sigmoid(h * self.f)", f=(1.0, 1.7)),
    Case("torch.sigmoid(h / self.f)", f=(1.0, 0.3)),
    Case("F.elu(h, self.f)", f=(1.0, 0.3)),
    Case("F.dropout(F.relu(h), self.f, self.training)", f=(0.0, 0.5)),
    Case("F.silu(h * k)", k=(1.0, 0.5)),
    Case("F.silu(h * k[0])", k=((1.0,), (2.0,))),
    Case("F.silu(h * k['of'])", k=({"of": 1.0}, {"of": 2.0})),
    Case("F.dropout(F.relu(h), k)", k=(0.0, 0.4)),
    Case("F.silu(h * (self.f * 2))", f=(0.5, 0.7)),
    Case("h * math.exp(self.f)", f=(0.5, 0.7)),
    Case("h * max(self.f, k)", f=(0.5, 0.7), k=(0.1, 0.9)),
]
FIXED = [  # numbers of the model alone, and sizes of views
    Case("F.silu(h / h.size(-1) * h.shape[1])"),
    Case("torch.baddbmm(h[:, None], x[:, None], self.linear.weight.expand(x.size(0), 6, 6)).view(-1, 6).relu()"),
    Case("F.relu(h.view(x.size(0), -1)).reshape(x.shape[0] * 2, -1)"),
]


@pytest.fixture
def model_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Case], nn.Module]:
    """Makes the model of a case, in a file of its own: tracing reads its source."""

    def made(case: Case) -> nn.Module:
        name = f"model_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(MODEL.format(body=case.body))
        monkeypatch.syspath_prepend(str(tmp_path))
        found: nn.Module = importlib.import_module(name).Model()
        found.__dict__["f"] = case.f[0]
        return found

    return made


def traced(model: nn.Module, case: Case) -> ForwardIR:
    batches = {batch: ModelInputs((torch.randn(batch, WIDTH),), {"k": case.k[0]}) for batch in (5, 8)}
    found = trace_forward(model, "", capture_examples(model, [""], batches)[""], ("norm",), ("linear",))
    assert isinstance(found, ForwardIR), found
    return found


def run(model: nn.Module, case: Case) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(case.batch, WIDTH)
    made: Tensor = model(x, case.k[1])
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.body} {case.k[0] if case.k[0] is not None else ''}")
def test_a_later_call_has_its_own_numbers(model_of: Callable[[Case], nn.Module], case: Case) -> None:
    model = model_of(case)
    forward = traced(model, case)
    model.__dict__["f"] = case.f[1]
    torch.testing.assert_close(run(with_forward(copy.deepcopy(model), forward), case), run(model, case))


@pytest.mark.parametrize("case", FLOATS, ids=lambda case: case.body)
def test_a_float_is_a_condition(model_of: Callable[[Case], nn.Module], case: Case) -> None:
    model = model_of(case)
    forward = traced(model, case)
    bound, planned = with_forward(copy.deepcopy(model), forward), replace(case, k=(case.k[0], case.k[0]))
    torch.testing.assert_close(run(bound, planned), run(model, planned))
    bound.__dict__["f"] = case.f[1]
    with pytest.raises(InputError):
        run(bound, case)


@pytest.mark.parametrize("case", FIXED, ids=lambda case: case.body)
def test_what_no_call_changes_is_recognised(model_of: Callable[[Case], nn.Module], case: Case) -> None:
    model = model_of(case)
    forward = traced(model, case)
    torch.testing.assert_close(run(with_forward(copy.deepcopy(model), forward), case), run(model, case))
