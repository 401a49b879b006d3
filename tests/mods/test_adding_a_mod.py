"""A mod is a line of the registry, a schema and a file: three that only these tests have are taken all the way."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from loka import dispatch
from loka.codegen import render_package
from loka.mods import mod_settings
from loka.mods.policy_loader import load_policy
from loka.mods.protocols import ModuleMod, OwnerMod, SiteMod
from loka.mods.registry import MODS, ModKind, mod_of
from loka.mods.rewriting.fuse_interaction import FuseInteractionMod
from loka.plan.draft import drafted_from
from loka.plan.mod_words import describe_changes, touches
from loka.plan.plan import Plan
from loka.plan.planner import make_plan
from loka.policy.policy_schema import json_schema
from loka.policy.problems import PolicyError
from tests.support.added_mods import LINES, registered
from tests.support.importing import import_folder

PROTOCOLS = {
    ModKind.MODULES: ModuleMod,
    ModKind.SITES: SiteMod,
    ModKind.OWNERS: OwnerMod,
    ModKind.INTERACTIONS: FuseInteractionMod,
}
MODEL = """\
import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.relu, self.gate = nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 64, bias=False)
        self.out = nn.Linear(64, 32)

    def forward(self, x):
        y = self.relu(self.up(x))
        return self.out(y * torch.sigmoid(self.gate(y)))


def gated():
    return Gated()


def example_inputs(batch_size):
    return (torch.randn(batch_size, 48),)
"""
POLICY = 'version: 1\nname: added\nmodel: {factory: "gatedmodel:gated", batch_size: 32}\ndefaults: {compute: keep}\n'
Made = tuple[Plan, ModuleType]


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The added mods among the others; a model, in the current directory."""
    (tmp_path / "gatedmodel.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with registered():
        yield
    for name in [each for each in sys.modules if each.split(".")[0] in ("gatedmodel", "added")]:
        del sys.modules[name]


@pytest.fixture
def make(added: None) -> Callable[[str], Made]:
    """The plan under some entries of `mods`, and its package."""

    def one(mods: str) -> Made:
        Path("added.yaml").write_text(f"{POLICY}mods: [{mods}]\n")
        plan = make_plan("added.yaml")
        Path("added").mkdir()
        for file, text in render_package(plan).items():
            Path("added", file).write_text(text)
        return plan, import_folder(Path("added").resolve())

    return one


def model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    made: nn.Module = importlib.import_module("gatedmodel").gated()
    return made, 3 * torch.randn(9, 48)


def gradients(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    y = module(x)
    named = dict(module.named_parameters())
    return {"y": y, **dict(zip(named, torch.autograd.grad(y.square().sum(), list(named.values())), strict=True))}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is on cpu.*:loka.dispatch.dispatch_errors.LokaWarning")
def test_from_policy_to_live_model(make: Callable[[str], Made]) -> None:
    plan, package = make("{use: six_relu, note: to try}, {use: late_bias}, {use: tanh_sigmoid}")
    assert {mod.use: (describe_changes(mod), mod.exact, mod.note) for mod in plan.mods} == {
        "six_relu": ("1 ReLU -> ReLU6", False, "to try"),
        "late_bias": ("a bias of 64 is added later in up, a bias of 32 is added later in out", True, ""),
        "tanh_sigmoid": ("1 sigmoid by way of tanh in the model itself", True, ""),
    }
    assert [each.what for each in touches(plan, "up")] == ["relu: ReLU -> ReLU6", "a bias of 64 is added later"]
    live, x = model()
    expected = copy.deepcopy(live)
    expected.relu = nn.ReLU6()
    with pytest.warns(dispatch.NewModelWarning, match="six_relu .* has to be trained"):
        patch = package.apply(live)
    assert type(live.relu) is nn.ReLU6
    found, exact = gradients(live, x), gradients(expected, x)
    assert found.keys() == exact.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, exact[name], rtol=1e-4, atol=1e-5, msg=name)
    patch.verify()
    text = Path("added/modules.py").read_text()
    assert "torch.tanh(" in text
    assert "product + self.bias" in text


def test_what_a_policy_may_write_and_what_init_proposes(added: None) -> None:
    names = {each["const"] for each in _uses(json_schema(mod_settings.MOD_SCHEMAS))}
    assert names == {*MODS, *LINES}
    Path("wrong.yaml").write_text(f"{POLICY}mods: [{{use: six_rleu}}]\n")
    with pytest.raises(PolicyError, match="did you mean six_relu"):
        load_policy("wrong.yaml")
    Path("wrong.yaml").write_text(f"{POLICY}mods: [{{use: six_relu, match: up}}]\n")
    with pytest.raises(PolicyError, match=r"six_relu cannot change 'up': it is a nn\.Linear, no nn\.ReLU"):
        make_plan("wrong.yaml")
    found = drafted_from("gatedmodel:gated", None, 32).mods
    assert {each.use: each.what for each in found if each.use in LINES} == {
        "six_relu": "1 ReLU -> ReLU6", "late_bias": "2 biases may be added later",
    }  # fmt: skip


def _uses(schema: dict) -> list[dict]:
    return [each["properties"]["use"] for each in schema["$defs"].values() if "use" in each.get("properties", {})]


@pytest.mark.parametrize("name", MODS)
def test_every_mod_of_the_registry_says_all_that_is_asked_of_its_kind(name: str) -> None:
    kind = MODS[name]
    mod = mod_of(name)
    assert isinstance(mod, PROTOCOLS[kind])
    assert [other for other, protocol in PROTOCOLS.items() if isinstance(mod, protocol)] == [kind]
    assert mod.name == name
