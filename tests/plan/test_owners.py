"""Which forward holds what a stranger's model computes: all of a layer's statements are in one owner's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from loka.graph.ir import ForwardIR
from loka.plan.plan import Plan
from loka.plan.planner import make_plan

POLICY = """
version: 1
name: owners
model: {{factory: "{name}:Model", inputs: "{name}:inputs", batch_size: 256}}
defaults: {{compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}}
{rest}
"""
FUSED = """
rules: [{match: {kind: linear, min_k: 1000000}, compute: keep, optional: true}]
mods: [{use: fuse_interaction}]
"""
IMPORTS = """
import torch
import torch.nn.functional as F
from torch import nn
"""
PlanOf = Callable[..., Plan]


@pytest.fixture
def plan_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> PlanOf:
    """`plan_of(text, rest)`: the plan for a file with `Model` and `inputs`; `rest` goes into the policy."""

    def planned(text: str, rest: str = "") -> Plan:
        name = request.node.name.partition("[")[0]
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / f"{name}.py").write_text(IMPORTS + text)
        (tmp_path / "policy.yaml").write_text(POLICY.format(name=name, rest=rest))
        return make_plan("policy.yaml")

    return planned


def forwards(plan: Plan) -> dict[str, ForwardIR]:
    """The forwards of owners, by the first module that has each."""
    return {each.modules[0]: each.forward for each in plan.bindings if each.forward is not None}


def sites_of(forward: ForwardIR) -> list[str]:
    return [step.call.site for step in forward.statements if step.call is not None]


def called(forward: ForwardIR) -> list[str]:
    """The children that stay calls."""
    return [step.text() for step in forward.statements if step.op == "module"]


JOINED = """
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        return torch.matmul(self.weight, x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Flatten(1), nn.Linear(256, 64), nn.Linear(64, 128), nn.Unflatten(1, (4, 32)))
        self.part, self.norm = Part(), nn.LayerNorm(32)

    def forward(self, x):
        return self.norm(torch.cat([self.mlp(x), self.part(x)], 1) + x)


def inputs(batch):
    return (torch.randn(batch, 8, 32),)
"""


def test_what_a_join_reads_is_computed_with_it(plan_of: PlanOf) -> None:
    """The multilayer perceptron is a Sequential with its views; the weighted sums have a module of their own."""
    (forward,) = forwards(plan_of(JOINED, FUSED)).values()
    assert called(forward) == []
    assert sites_of(forward) == ["mlp.1", "mlp.2", "part.weight"]
