"""Interactions are found where no module of their own is around them: in the model itself, and in containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from loka.plan.planner import make_plan

MODEL = """
import torch
from torch import nn


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_rank = nn.Linear(16, 8, bias=False)
        self.out = nn.Linear(128, 1)

    def forward(self, x):
        products = x @ self.to_rank(x.transpose(1, 2))
        return self.out(products.flatten(1))


def inputs(batch):
    return (torch.randn(batch, 16, 32),)
"""
POLICY = """
version: 1
name: mixing
model: {factory: "mixing_linears:Mixing", inputs: "mixing_linears:inputs", batch_size: 256}
defaults: {compute: keep, fuse: never}
mods: [{use: fuse_interaction}]
"""


def test_a_mixing_layer_by_a_linear_on_the_models_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mixing_linears.py").write_text(MODEL)
    (tmp_path / "policy.yaml").write_text(POLICY)
    plan = make_plan("policy.yaml")
    assert [each.what for each in plan.interactions] == ["a mixing layer of 16 embeddings of 32, rank 8"]
    assert plan.interactions[0].sites == ("to_rank", "#0")


CROSSES = """
import torch
from torch import nn


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, states):
        x0, x = states
        return x0, x0 * self.linear(x) + x


class Twice(nn.Module):
    def forward(self, x):
        return x, x


def build():
    return nn.Sequential(Twice(), Cross(), Cross())


def inputs(batch):
    return (torch.randn(batch, 64),)
"""


def test_cross_layers_in_a_model_that_is_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sequential_crosses.py").write_text(CROSSES)
    text = POLICY.replace("mixing_linears:Mixing", "sequential_crosses:build")
    (tmp_path / "policy.yaml").write_text(text.replace("mixing_linears", "sequential_crosses"))
    plan = make_plan("policy.yaml")
    assert [each.owner for each in plan.interactions] == ["1", "2"]


LAYERS = """
import torch
from torch import nn


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"rank": nn.Linear(16, 8, bias=False), "out": nn.Linear(128, 16 * 32)}) for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            products = {products}
            assert products.shape[1] * products.shape[2] == 128
            x = block["out"](products.flatten(1)).unflatten(1, (16, 32))
        return x


def inputs(batch):
    return (torch.randn(batch, 16, 32),)
"""


@pytest.mark.parametrize(
    "products",
    [
        'x @ block["rank"](x.mT)',
        'torch.einsum("...nd,...md,rm->...nr", x, x, block["rank"].weight)',
    ],
    ids=["a linear", "an ellipsis"],
)
def test_mixing_layers_of_a_loop(products: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"looped_{len(products)}"
    (tmp_path / f"{name}.py").write_text(LAYERS.replace("{products}", products))
    (tmp_path / "policy.yaml").write_text(
        POLICY.replace("mixing_linears:Mixing", f"{name}:Layers").replace("mixing_linears", name)
    )
    plan = make_plan("policy.yaml")
    assert [each.what for each in plan.interactions] == ["a mixing layer of 16 embeddings of 32, rank 8"] * 2
