"""Packages of mixing layers in random spellings: the same kernels, and the gradients of the model."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path

import pytest
import torch

from tests.support.codegen.policy_packages import Make
from tests.support.spellings.mixing_layers import INPUTS, SEEDS, gradients, mixing_module

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),  # that this is the CPU
]

SIZES = (16, 24, 4, 8)


def kernels(text: str) -> str:
    """A file of kernels without the digest of what it was generated from."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("STAMP = "))


def test_spellings_have_the_same_kernels_and_the_model_s_gradients(package: Make, tmp_path: Path) -> None:
    rendered: dict[str, set[str]] = {"triton_kernels.py": set(), "fused.py": set(), "kernels.py": set()}
    n, d, r, c = SIZES
    for seed in SEEDS:
        name = f"spelled_layer_{seed}"
        (tmp_path / f"{name}.py").write_text(mixing_module(seed, SIZES) + INPUTS.format(n=n, d=d))
        policy = (
            f'version: 1\nname: spelled\nmodel: {{factory: "{name}:Layer", inputs: "{name}:inputs", batch_size: 32}}\n'
            "defaults: {compute: keep, fuse: always}\nmods: [{use: fuse_interaction}]\n"
        )
        _, files, generated = package(f"gen_{name}", policy)
        for file, texts in rendered.items():
            texts.add(kernels(files[file]).replace(f"gen_{name}", "gen"))
        model = importlib.import_module(name).Layer()
        sys.modules.pop(name)
        patched = copy.deepcopy(model)
        x = torch.randn(9, n, d, requires_grad=True)
        dy = torch.randn(9, n * r + c * d)
        with generated.apply(patched):
            for (what, right), (_, got) in zip(gradients(model, x, dy), gradients(patched, x, dy), strict=True):
                assert (got - right).norm() <= 1e-5 * right.norm(), (seed, what)
    assert {file: len(texts) for file, texts in rendered.items()} == dict.fromkeys(rendered, 1)


APART = """\
import torch
from torch import nn


class Sums(nn.Module):
    def __init__(self, n, made):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, made) / n**0.5)

    def forward(self, x):
        return (x.permute(0, 2, 1) @ self.weight).permute(0, 2, 1)


class Pairs(nn.Module):
    def __init__(self, n, d, rank, made):
        super().__init__()
        self.n, self.d, self.rank, self.made = n, d, rank, made
        self.weight = nn.Parameter(torch.randn(n, rank) / n**0.5)
        self.norm = nn.LayerNorm(n * rank)
        self.mlp = nn.Sequential(nn.Linear(n * rank, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, made * d))

    def forward(self, x):
        pairs = torch.bmm(x, x.permute(0, 2, 1) @ self.weight)
        return self.mlp(self.norm(pairs.view(-1, self.n * self.rank))).view(-1, self.made, self.d)


class Layer(nn.Module):
    def __init__(self, n=16, d=24, rank=4):
        super().__init__()
        self.sums, self.pairs, self.norm = Sums(n, n // 2), Pairs(n, d, rank, n // 2), nn.LayerNorm(d)
        self.shortcut = nn.Identity()

    def forward(self, x):
        joined = torch.concat((self.pairs(x), self.sums(x)), dim=1)
        return self.norm(joined + self.shortcut(x))


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(16 * 24, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(1))
"""


@pytest.mark.parametrize("shortcut", ["nn.Identity()", "Sums(n, n)"], ids=["itself", "projected"])
def test_a_wukong_in_small_modules_is_mixed_and_joined(package: Make, tmp_path: Path, shortcut: str) -> None:
    name = f"apart_wukong_{'projected' if 'Sums' in shortcut else 'itself'}"
    (tmp_path / f"{name}.py").write_text(APART.replace("nn.Identity()", shortcut) + INPUTS.format(n=16, d=24))
    plan, _, generated = package(
        f"gen_{name}",
        f'version: 1\nname: apart\nmodel: {{factory: "{name}:Ranker", inputs: "{name}:inputs", '
        "batch_size: 32}\ndefaults: {compute: keep, fuse: always}\nmods: [{use: fuse_interaction}]\n",
    )
    found = sorted((each.owner, each.what.split(" of ")[0]) for each in plan.interactions)
    layers = ("layers.0", "layers.1")
    assert found == sorted(
        [*((each, "a layer_norm") for each in layers), *((f"{each}.pairs", "a mixing layer") for each in layers)]
    )
    model = importlib.import_module(name).Ranker()
    sys.modules.pop(name)
    patched = copy.deepcopy(model)
    x = torch.randn(9, 16, 24, requires_grad=True)
    dy = torch.randn(9, 1)
    with generated.apply(patched):
        for (what, right), (_, got) in zip(gradients(model, x, dy), gradients(patched, x, dy), strict=True):
            assert (got - right).norm() <= 1e-4 * right.norm() + 1e-6, what
