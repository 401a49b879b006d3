"""Exact mods that `auto` plans where they win, without being asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loka.kernels.measurements.parts import COMPILED, INTERACTIONS, RENDERED, Part
from loka.mods.policy_loader import load_policy
from loka.plan import planner
from loka.plan.examine import examine
from loka.plan.plan import Plan
from loka.plan.plan_of import plan_of
from loka.policy.problems import PolicyError
from tests.support.plan.plan_costs import MadeUp

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
        self.experts = nn.ModuleList(nn.Linear(64, 128) for _ in range(2))
        self.mix = Mix(4)

    def forward(self, x):
        x = torch.cat([torch.relu(expert(x)) for expert in self.experts], dim=1)
        return self.mix(x.unflatten(1, (4, 64)))


def build():
    return Model()


def inputs(batch_size):
    return (torch.randn(batch_size, 64),)
"""
POLICY = """\
version: 1
name: experts
model: {{factory: "expertmodel:build", inputs: "expertmodel:inputs", batch_size: 4096}}
defaults: {{compute: keep{fuse}}}
{mods}
"""
MERGED = (64, 256)  # K and N of the two experts as one

PlanFor = Callable[..., Plan]


@pytest.fixture
def plan_for(write_module) -> PlanFor:
    folder = write_module("expertmodel", MODEL)

    def make(costs: MadeUp | None, mods: str = "", fuse: str = "") -> Plan:
        (folder / "p.yaml").write_text(POLICY.format(mods=mods, fuse=fuse))
        return plan_of(examine(load_policy("p.yaml")), None, costs)

    return make


def wins() -> MadeUp:
    """Interactions that win by far in LoKA's kernels; merged products save the input's second reading."""
    return MadeUp(factor=lambda part: 9.0 if part.kernel == COMPILED else 1.0)


def loses() -> MadeUp:
    """Interactions that lose in LoKA's kernels, and merged products that take nine times as long."""

    def factor(part: Part) -> float:
        fused = part.kernel == RENDERED and part.work in INTERACTIONS
        return 9.0 if fused or (part.contraction, part.columns) == MERGED else 1.0

    return MadeUp(factor=factor)


def used(plan: Plan) -> list[tuple[str, str]]:
    return [(mod.use, mod.place) for mod in plan.mods]


def test_they_are_planned_where_they_win(plan_for: PlanFor) -> None:
    plan = plan_for(wins())
    assert used(plan) == [("merge_siblings", "auto"), ("fuse_interaction", "auto")]
    assert [each.owner for each in plan.interactions] == ["mix"]
    merged = plan.mods[0]
    assert merged.gain is not None
    assert merged.gain.us > 0
    assert "experts.0+experts.1" in [site.site.name for site in plan.sites]


def test_both_say_what_they_gain(plan_for: PlanFor, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_for(None)
    monkeypatch.setattr(planner, "open_measurements", lambda policy: wins())
    gains = {mod.use: mod.gain for mod in planner.planned("p.yaml", gains=True).plan.mods}
    assert set(gains) == {"merge_siblings", "fuse_interaction"}
    assert all(gain is not None and gain.us > 0 for gain in gains.values())


GATE = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(64, 128), nn.Linear(64, 128)

    def forward(self, x):
        return torch.relu(self.gate(x)) * self.up(x)


def build():
    return Model()


def inputs(batch_size):
    return (torch.randn(batch_size, 64),)
"""


@pytest.mark.parametrize("alike", [False, True], ids=["a gate", "activated alike"])
def test_siblings_that_go_on_differently_have_no_known_gain(write_module, alike: bool) -> None:
    """The activation behind one of them is in no time of the merged product."""
    text = GATE.replace("* self.up(x)", "+ torch.relu(self.up(x))") if alike else GATE
    folder = write_module("gatemodel", text)
    (folder / "p.yaml").write_text(POLICY.format(mods="", fuse="").replace("expertmodel", "gatemodel"))
    plan = plan_of(examine(load_policy("p.yaml")), None, wins())
    assert [use for use, _ in used(plan)] == (["merge_siblings"] if alike else [])


def test_they_are_left_where_they_lose_and_where_nothing_is_measured(plan_for: PlanFor) -> None:
    for plan in (plan_for(loses()), plan_for(None)):
        assert used(plan) == []
        assert plan.interactions == ()
        assert [site.site.name for site in plan.sites] == ["experts.0", "experts.1", "mix.rank", "mix#0"]


@pytest.mark.parametrize(
    ("mods", "fuse"),
    [("mods: {auto: false}", ""), ("mods: [{auto: false}]", ""), ("", ", fuse: never"), ("", ", fuse: always")],
)
def test_a_policy_turns_them_off(plan_for: PlanFor, mods: str, fuse: str) -> None:
    assert used(plan_for(wins(), mods, fuse)) == []


def test_an_entry_of_the_policy_stands_for_its_mod(plan_for: PlanFor) -> None:
    plan = plan_for(wins(), "mods: [{use: fuse_interaction, match: nothing, optional: true}]")
    assert used(plan) == [("fuse_interaction", "p.yaml:5"), ("merge_siblings", "auto")]
    assert plan.interactions == ()
    assert used(plan_for(loses(), "mods: [{use: merge_siblings}, {auto: true}]")) == [("merge_siblings", "p.yaml:5")]


def test_a_base_and_its_child_say_it_together(plan_for: PlanFor, tmp_path) -> None:
    plan_for(None, "mods: [{use: merge_siblings}]")
    (tmp_path / "q.yaml").write_text("version: 1\nname: child\nextends: p.yaml\nmods: {auto: false}\n")
    policy = load_policy("q.yaml")
    assert [rule.use for rule in policy.mods] == ["merge_siblings"]
    assert not policy.auto_mods


def test_another_key_is_refused_by_name(plan_for: PlanFor) -> None:
    with pytest.raises(PolicyError, match=r'unknown key "where" in auto; remove it, or use one of auto'):
        plan_for(None, "mods: [{auto: false, where: faster}]")
    with pytest.raises(PolicyError, match=r"expected true or false"):
        plan_for(None, "mods: {auto: never}")
