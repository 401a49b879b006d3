"""Chains of modules that are called twice, and of tied Parameters: no function takes one tensor in two places.

torch.compile refuses an autograd function that is given the same tensor twice.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from loka.codegen import render_package
from loka.plan.planner import make_plan
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU

MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))
        self.norm = nn.LayerNorm(64)
        if form == "tied":
            self.b.weight = self.a.weight

    def forward(self, x):
        if self.form == "linear":
            return self.c(self.a(torch.relu(self.a(x))))
        if self.form == "norm":
            return self.c(self.norm(self.b(self.norm(self.a(x)))))
        if self.form == "around":
            return self.c(self.norm(self.a(self.norm(x))))
        return self.c(self.b(torch.relu(self.a(x))))


def linear():
    return Net("linear")


def norm():
    return Net("norm")


def around():
    return Net("around")


def tied():
    return Net("tied")


def inputs(batch):
    return (torch.randn(batch, 64),)
"""
FP8 = "compute: fp8, power_of_two: true, requantize_transpose: true, fuse: always"


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "read_twice_models.py").write_text(MODELS)
    yield tmp_path
    for name in [each for each in sys.modules if each.startswith("read_twice_")]:
        sys.modules.pop(name)


@pytest.mark.slow
@pytest.mark.parametrize("defaults", [FP8, "compute: keep, fuse: always"])
@pytest.mark.parametrize("form", ["linear", "norm", "around", "tied"])
def test_it_compiles_whole_and_gives_what_it_gives_in_eager(workplace: Path, form: str, defaults: str) -> None:
    name = f"read_twice_{form}_{'fp8' in defaults}"
    (workplace / "policy.yaml").write_text(
        f'version: 1\nname: {name}\nmodel: {{factory: "read_twice_models:{form}", '
        f'inputs: "read_twice_models:inputs", batch_size: 32}}\ndefaults: {{{defaults}}}\n'
    )
    package = plans.import_package(render_package(make_plan("policy.yaml")), workplace, name)
    torch.manual_seed(0)
    model: nn.Module = getattr(__import__("read_twice_models"), form)()
    x, dy = torch.randn(9, 64), torch.randn(9, 64)
    own = chains.gradients(copy.deepcopy(model), x, dy)
    with package.apply(model) as patch:
        eager = chains.gradients(model, x, dy)
        patch.verify()
        compiled = chains.gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), x, dy)
    compiled = {name.removeprefix("_orig_mod."): value for name, value in compiled.items()}
    assert eager.keys() == compiled.keys() == own.keys()
    limit = 0.35 if "fp8" in defaults else 1e-5
    for name, value in eager.items():
        assert torch.equal(value, compiled[name])
        assert (value - own[name]).norm() <= limit * own[name].norm()
