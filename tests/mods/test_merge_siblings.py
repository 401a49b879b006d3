"""merge_siblings on random modules: the same function, and the text that a reader sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from loka.cli import main
from loka.errors import LokaError
from loka.graph.equivalence import source
from loka.graph.expression import PRODUCT, local, text_of
from loka.graph.trace import tracer
from loka.mods.rewriting import merge_siblings, rewriting_tools
from loka.mods.rewriting.merge_siblings import ALONE, Siblings
from loka.plan.planner import make_plan
from tests.support.models import forward_mods as zoo


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_random_experts_are_the_same_function(seed: int) -> None:
    torch.manual_seed(seed)
    body = zoo.Experts(seed)
    forward, sizes, _ = zoo.traced(body, body.inputs)
    found, unchanged = merge_siblings.find(forward, sizes)
    (siblings,) = found
    assert siblings.members == (*(f"experts.{i}" for i in range(len(body.sizes))), "w")
    assert siblings.n == sum(body.sizes) + len(body.w)
    assert [(each.name, each.reason) for each in unchanged] == [("other", ALONE)]
    rewritten = siblings.rewritten(forward)
    calls = [step.call.site for step in rewritten.statements if step.call is not None]
    assert calls == ["other", siblings.name]
    zoo.assert_same(body, rewritten, body.inputs)


class Two(nn.Module):
    """Two projections, one of them without a bias, each followed by the same activation."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 4), nn.Linear(8, 6, bias=False)
        self.act = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.act(self.q(x)), self.act(self.k(x))


MERGED = """\
def forward(self, x):
    q_k = torch.nn.functional.linear(x, torch.cat([self.q.weight, self.k.weight]), \
torch.cat([self.q.bias, self.k.weight.new_zeros(6)]))
    q_k_relu = torch.nn.functional.relu(q_k)
    parts = q_k_relu.split((4, 6), -1)
    act = parts[0]
    act_1 = parts[1]
    return (act, act_1)
"""


def inputs(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 8),)


def test_the_text_has_the_activation_of_both_before_the_split() -> None:
    forward, sizes, _ = zoo.traced(Two(), inputs)
    (siblings,), _ = merge_siblings.find(forward, sizes)
    rewritten = siblings.rewritten(forward)
    assert source(rewritten) == MERGED
    call = next(step.call for step in rewritten.statements if step.call is not None)
    assert (call.site, call.x, call.out) == ("q+k", local("x"), PRODUCT)
    assert text_of(call.weight) == "torch.cat([self.q.weight, self.k.weight])"
    assert call.linear(call.x, call.weight, call.bias) == rewritten.statements[0].value


def test_an_activation_in_place_that_follows_both_alike_is_no_obstacle() -> None:
    body = Two(inplace=True)
    forward, sizes, _ = zoo.traced(body, inputs)
    (siblings,), _ = merge_siblings.find(forward, sizes)
    zoo.assert_same(body, siblings.rewritten(forward), inputs)


class Twice(Two):
    """One projection is called for two inputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.q(x) + self.q(x * 2), self.k(x)


def test_what_cannot_be_merged_says_why() -> None:
    reasons = {"q": rewriting_tools.SEVERAL_CALLS, "k": ALONE}
    forward, sizes, _ = zoo.traced(Twice(), inputs)
    found, unchanged = merge_siblings.find(forward, sizes)
    assert found == ()
    assert {each.name: each.reason for each in unchanged} == reasons


def test_siblings_that_are_not_there_are_a_fault_of_ours() -> None:
    forward, _, _ = zoo.traced(Two(), inputs)
    with pytest.raises(LokaError, match="'q\\+z' does not stand in its forward"):
        Siblings("q+z", ("q", "z"), (4, 6), 8).rewritten(forward)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 1e9 else x * 1.0


class Beside(nn.Module):
    """Two projections, and a module that torch cannot read."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.gate = nn.Linear(8, 4), nn.Linear(8, 4), Branching()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.q(x).relu() * self.k(x))

    def example_inputs(self, batch: int) -> tuple[Tensor, ...]:
        return inputs(batch)


def test_a_module_that_cannot_be_read_stays_a_call_beside_what_is_merged(tmp_path: Path) -> None:
    policy = tmp_path / "p.yaml"
    model = f'{{factory: "{__name__}:Beside", batch_size: 32}}'
    policy.write_text(
        f"version: 1\nname: p\nmodel: {model}\ndefaults: {{compute: keep}}\nmods: [{{use: merge_siblings}}]\n"
    )
    (mod,) = make_plan(policy).mods
    assert [result.site for result in mod.rewritten] == ["q+k"]


class Levels(nn.Module):
    """Two projections of two inputs, one after the other."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.unused = unused

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x) * self.b(x))
        both = self.c(x), self.d(x)
        return both[0] if self.unused else both[0] * both[1]

    def example_inputs(self, batch: int) -> tuple[Tensor, ...]:
        return inputs(batch)


class Unused(Levels):
    def __init__(self) -> None:
        super().__init__(unused=True)


@pytest.mark.parametrize(("name", "merged"), [("Levels", ["a+b", "c+d"]), ("Unused", ["a+b"])])
def test_groups_of_one_forward_are_read_together(tmp_path: Path, monkeypatch, name: str, merged: list[str]) -> None:
    scopes: list[tuple[str, ...]] = []
    plain = tracer.trace_forward

    def counted(module, owner, examples, inline, sites, quick):
        scopes.append(sites)
        return plain(module, owner, examples, inline, sites, quick)

    monkeypatch.setattr(tracer, "trace_forward", counted)
    policy = tmp_path / "p.yaml"
    model = f'{{factory: "{__name__}:{name}", batch_size: 32}}'
    policy.write_text(
        f"version: 1\nname: p\nmodel: {model}\ndefaults: {{compute: keep}}\nmods: [{{use: merge_siblings}}]\n"
    )
    (mod,) = make_plan(policy).mods
    traced = tuple(scopes)
    assert [result.site for result in mod.rewritten] == merged
    said = CliRunner().invoke(main.app, ["validate", str(policy)]).output
    assert f"{4 - len(merged)} sites (4 before mods made one of several)" in said
    assert name == "Unused" or traced.count(("a", "b", "c", "d")) == len([each for each in traced if "a" in each]) == 1
