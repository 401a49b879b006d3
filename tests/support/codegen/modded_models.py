"""Models whose policies ask for mods, and their packages, for the tests of what policies make of them."""

from __future__ import annotations

import copy
import importlib
import itertools
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from loka.codegen import render_package
from loka.plan.plan import Plan
from loka.plan.planner import make_plan
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans

_NUMBERS = itertools.count()  # of packages: the compiler remembers a name for good
MODULE = "modded_models_made"  # what they are imported as
MODELS = """
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from loka.zoo.dlrm import DCNSizes, DCNv2, DLRM
from loka.zoo.wukong import Wukong, WukongSizes

def seeded(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model

def dcnv2():
    return seeded(DCNv2(DCNSizes(embeddings=6, dim=16, layers=3, rank=32, over=(64, 48))))

def inputs(batch):
    return (torch.randn(batch, 6, 16, generator=torch.Generator().manual_seed(1)),)

class Hidden(DCNv2):
    def forward(self, embeddings):
        with torch.no_grad():  # a forward that is not traced
            embeddings.sum()
        return super().forward(embeddings)

def hidden():
    return seeded(Hidden(DCNSizes(embeddings=6, dim=16, layers=3, rank=32, over=(64, 48))))

class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.rank = nn.Linear(16, 16), nn.Parameter(torch.randn(6, 16))

    def forward(self, x):
        x = x * self.linear(x) + x
        return (x + x @ (x.transpose(1, 2) @ self.rank)).abs_()

class Relu(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.body, self.last = nn.Flatten(), InPlace(), nn.Linear(96, 1)

    def forward(self, x):
        return self.last(self.first(self.body(x)))

def in_place():
    return seeded(Relu())

def tower():
    return seeded(nn.Sequential(nn.Flatten(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 1)))

class Pairs(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.rank, self.last = nn.Parameter(torch.randn(16, 4)), nn.Linear(64, 1)

    def forward(self, x):
        return self.last(torch.matmul(x, torch.matmul(x.transpose(1, 2), self.rank)).flatten(1))

def thick():
    return seeded(Pairs(2304))

def thick_inputs(batch):
    return (torch.randn(batch, 16, 2304),)

def thin_inputs(batch):
    return (torch.randn(batch, 16, 64),)

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(96) for _ in range(24)])
        self.linears = nn.ModuleList([nn.Linear(96, 96) for _ in range(24)])
        self.first, self.cross = nn.Linear(96, 96), nn.Linear(96, 96)

    def forward(self, x):
        x = x * self.cross(x).tanh() + x
        x = x * self.first(x) + x
        for norm, linear in zip(self.norms, self.linears):
            x = x + torch.tanh(linear(norm(x)))
        return x

def deep():
    torch.manual_seed(0)
    return Deep()

def deep_inputs(batch):
    return (torch.randn(batch, 96),)

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.high = normed(), normed()

    def forward(self, x):
        return self.high(self.low(x).to(self.high[1].weight.dtype))

def normed():
    return nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 96), nn.LayerNorm(96), nn.SiLU())

def mixed(low=torch.float32, high=torch.float64):
    model = seeded(Mixed())
    model.low.to(low)
    model.high.to(high)
    return model

def mixed_low():
    return mixed(high=torch.float32)

def mixed_high():
    return mixed(low=torch.float64)

def deep_inputs_float64(batch):
    return (torch.randn(batch, 96, dtype=torch.float64),)

def sized_float64():
    return sized().double()

def sized_inputs_float64(batch):
    return (sized_inputs(batch)[0].double(),)

def on_meta():
    with torch.device("meta"):
        return Deep()

def faked():
    with FakeTensorMode():
        return Deep()

def faked_inputs(batch):
    with FakeTensorMode():
        return deep_inputs(batch)

SIZES = {}

def sized():
    sizes = {key: SIZES[key] for key in ("embeddings", "dim", "layers", "rank")}
    if SIZES["kind"] == "wukong":
        return seeded(Wukong(WukongSizes(**sizes, hidden=32)))
    return seeded(DCNv2(DCNSizes(**sizes, over=(24,))))

def sized_inputs(batch):
    return (torch.randn(batch, SIZES["embeddings"], SIZES["dim"], generator=torch.Generator().manual_seed(1)),)
"""


class Workplace:
    """Makes packages of the models above, each once, and forgets them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._names = folder, [MODULE]
        self._made: dict[tuple[object, ...], tuple[Plan, dict[str, str], ModuleType]] = {}
        (folder / f"{MODULE}.py").write_text(MODELS)
        self.models = importlib.import_module(MODULE)

    def make(
        self,
        factory: str,
        defaults: str = "compute: keep",
        mods: str = "{use: fuse_interaction}",
        inputs: str = "inputs",
        rules: str = "",
    ) -> tuple[Plan, dict[str, str], ModuleType]:
        key = (factory, defaults, mods, inputs, rules, *self.models.SIZES.items())
        if key in self._made:
            return self._made[key]
        (self.folder / "policy.yaml").write_text(
            f'version: 1\nname: crossing\nmodel: {{factory: "{MODULE}:{factory}", inputs: "{MODULE}:{inputs}", '
            f"batch_size: 32}}\ndefaults: {{{defaults}}}\nmods: [{mods}]\nrules: [{rules}]\n"
        )
        plan = make_plan("policy.yaml")
        files = render_package(plan)
        self._names.append(f"gen_modded_{next(_NUMBERS)}")
        self._made[key] = plan, files, plans.import_package(files, self.folder, self._names[-1])
        return self._made[key]

    def forget(self) -> None:
        for name in self._names:
            for module in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
                sys.modules.pop(module)


def equal_but_for_rounding(model: nn.Module, package: ModuleType, x: Tensor, limit: float = 2e-5) -> None:
    """That a patched model gives the outputs and all gradients of the model in float64."""
    dy = torch.randn(model(x).shape, generator=torch.Generator().manual_seed(2))
    exact = chains.gradients(copy.deepcopy(model).double(), x.double(), dy.double())
    keys = model.state_dict().keys()
    with package.apply(model):
        assert model.state_dict().keys() == keys
        found = chains.gradients(model, x, dy)
    assert found.keys() == exact.keys()
    for key, value in found.items():
        assert (value.double() - exact[key]).norm() <= limit * exact[key].norm() + 1e-9, key
