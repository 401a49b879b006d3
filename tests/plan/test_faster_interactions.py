"""`fuse_interaction` with `where: faster`: in the modules where kernels of LoKA are faster by the measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loka.cli.main import app
from loka.kernels.measurements.parts import COMPILED, RENDERED, Part
from loka.mods.policy_loader import load_policy
from loka.plan.examine import examine
from loka.plan.plan import Plan
from loka.plan.plan_of import plan_of
from loka.plan.serialize import from_json, to_json
from loka.policy.problems import PolicyError
from tests.support.plan.plan_costs import MadeUp

pytestmark = pytest.mark.slow

MODEL = """
import torch
from torch import nn


class Mix(nn.Module):
    def __init__(self, embeddings):
        super().__init__()
        self.rank = nn.Parameter(torch.randn(embeddings, 2))

    def forward(self, x):
        return x @ (x.transpose(1, 2) @ self.rank)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.narrow, self.down, self.wide = Mix(4), nn.Linear(8, 2048), Mix(4)

    def forward(self, x):
        x = self.down(self.narrow(x).flatten(1))
        return self.wide(x.unflatten(1, (4, 512)))


def build():
    return Model()


def inputs(batch_size):
    return (torch.randn(batch_size, 4, 64),)
"""
POLICY = """\
version: 1
name: mixes
model: {{factory: "mixmodel:build", inputs: "mixmodel:inputs", batch_size: 4096}}
defaults: {{compute: keep}}
mods: [{{use: fuse_interaction{where}}}]
"""
FASTER = ", where: faster"

PlanFor = Callable[..., Plan]


@pytest.fixture
def plan_for(write_module) -> PlanFor:
    folder = write_module("mixmodel", MODEL)

    def make(costs: MadeUp | None, where: str = FASTER) -> Plan:
        (folder / "p.yaml").write_text(POLICY.format(where=where))
        return plan_of(examine(load_policy("p.yaml")), None, costs)

    return make


def slow(kernel: str, *widths: int) -> MadeUp:
    """Interactions of these widths are slow on one side, all others twice as fast in kernels of LoKA."""

    def factor(part: Part) -> float:
        return 9.0 if part.kernel == kernel and part.columns in widths else 2.0 if part.kernel == COMPILED else 1.0

    return MadeUp(factor=factor)


def owners(plan: Plan) -> list[str]:
    return [each.owner for each in plan.interactions]


def test_each_module_goes_by_its_own_times(plan_for: PlanFor) -> None:
    plan = plan_for(slow(RENDERED, 64))
    assert owners(plan) == ["wide"]
    (mod,) = plan.mods
    (left,) = [each for each in mod.unchanged if each.name == "narrow"]
    assert left.reason.startswith("torch.compile is faster here: ")
    assert owners(plan_for(slow(RENDERED, 512))) == ["narrow"]
    assert owners(plan_for(slow(COMPILED, 64, 512))) == ["narrow", "wide"]
    assert owners(plan_for(slow(RENDERED, 64), where="")) == ["narrow", "wide"]  # as before


def test_what_gains_next_to_nothing_is_left(plan_for: PlanFor) -> None:
    plan = plan_for(MadeUp(factor=lambda part: 1.04 if part.kernel == COMPILED else 1.0))
    assert owners(plan) == []
    (mod,) = plan.mods
    assert all(each.reason.startswith("torch.compile is as fast here, to a factor of 1.05: ") for each in mod.unchanged)
    assert owners(plan_for(MadeUp(factor=lambda part: 1.06 if part.kernel == COMPILED else 1.0))) == ["narrow", "wide"]


def test_nowhere_faster_is_a_plan_without_any(plan_for: PlanFor) -> None:
    plan = plan_for(slow(RENDERED, 64, 512))
    assert owners(plan) == []
    assert from_json(to_json(plan), "p.json") == plan


def test_without_times_it_is_as_always(plan_for: PlanFor) -> None:
    def unmeasured(part: Part) -> float | None:
        return None if part.kernel == COMPILED else 9.0

    assert owners(plan_for(MadeUp(factor=unmeasured))) == owners(plan_for(None)) == ["narrow", "wide"]


def test_another_word_is_refused(plan_for: PlanFor) -> None:
    with pytest.raises(PolicyError, match=r"where: text \"sometimes\" is not known; give one of always, faster"):
        plan_for(None, ", where: sometimes")


def test_init_drafts_it(plan_for: PlanFor, tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["init", "mixmodel:build", "--inputs", "mixmodel:inputs", "-o", "drafted.yaml"])
    assert ran.exit_code == 0
    text = (tmp_path / "drafted.yaml").read_text()
    assert "mods:\n  - {use: fuse_interaction, where: faster, optional: true} # " in text
    (mod,) = load_policy("drafted.yaml").mods
    assert dict(mod.settings) == {"where": "faster"}
