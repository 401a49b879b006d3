"""Mods of policies for small models: what `loka init` proposes, and what it says where a mod cannot be carried out."""

from __future__ import annotations

import sys

import pytest

MODEL = """\
import torch
from torch import nn


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(13, 6 * 16)
        self.features = nn.ModuleList([nn.Linear(16, 8) for _ in range(6)])
        self.head = nn.Linear(48, 1)

    def forward(self, x):
        x = self.up(x).view(-1, 6, 16)
        return self.head(torch.cat([linear(x[:, i]) for i, linear in enumerate(self.features)], 1))


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.ModuleList([nn.Linear(13, 13) for _ in range(4)])
        self.gates = nn.ModuleList([nn.Linear(13, 4) for _ in range(3)])

    def forward(self, x):
        for linear in self.rows:
            x = x * linear(x)
        return sum(torch.nn.functional.layer_norm(gate(x), (4,)) for gate in self.gates)


class Often(nn.Module):
    def forward(self, x):
        x = torch.nn.functional.silu(x)
        x = x * torch.sigmoid(x)
        x = torch.nn.functional.silu(x)
        return x + 1


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[Often() for _ in range(5)])
        self.head = nn.Linear(13, 1)

    def forward(self, x):
        return self.head(self.layers(x))


def deep():
    return Deep()


def features():
    return Features()


def rows():
    return Rows()


def hooked():
    model = Features()
    model.up.register_forward_hook(lambda module, args, result: result * 2)
    return model


def example_inputs(batch_size):
    return (torch.randn(batch_size, 13),)
"""
POLICY = """\
version: 1
name: small
model: {{factory: "smallmodel:{model}", batch_size: 32}}
defaults: {{compute: keep}}
mods:
  - {mod}
"""


@pytest.fixture
def small(shop, loka, monkeypatch):
    """`small(model, mod)`: what `loka plan` makes of a policy with one mod."""
    (shop.folder / "smallmodel.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "smallmodel", raising=False)

    def plan(model: str, mod: str):
        return loka("plan", shop.write_policy(POLICY.format(model=model, mod=mod)))

    return plan


def drafted(shop, loka, model: str) -> str:
    assert loka("init", f"smallmodel:{model}", "-o", "policies/first.yaml").status == 0
    return (shop.folder / "policies/first.yaml").read_text(encoding="utf-8")


@pytest.mark.slow
def test_small_linears_of_a_list_are_proposed_and_can_be_batched(small, shop, loka):
    line = next(line for line in drafted(shop, loka, "features").splitlines() if "batch_small" in line)
    said = "6 linears of K 16, N 8 over slices of one tensor are one batched product in the model itself"
    assert f"{said}; the same function" in line
    ran = small("features", line.partition("- ")[2].partition(" #")[0])
    assert ran.status == 0, ran.err
    assert f"batch_small (shop.yaml:6), the same function: {said}" in ran.out


def test_an_exception_for_a_folder_of_modules_alone_is_refused(small):
    """`except: features` excepts none of the linears in it."""
    ran = small("features", "{use: no_bias, except: features}")
    assert ran.status == 2
    assert "'features' matches no module that it could change; did you mean 'features." in ran.err


def test_lists_in_a_row_and_siblings_are_not_proposed(small, shop, loka):
    assert "batch_small" not in drafted(shop, loka, "rows")


@pytest.mark.parametrize(
    ("model", "mod", "says"),
    [
        ("features", "{use: merge_siblings, match: [up, head]}", "no other linear that the mod is for reads its input"),
        ("rows", "{use: merge_siblings, match: gates.0}", "no other linear that the mod is for reads its input"),
        (
            "features",
            "{use: batch_small, match: [features.0, features.1]}",
            "fewer than 3 linears of its shape that the mod is for, over different inputs, stand in one forward",
        ),
        ("rows", "{use: block_norm}", "block_norm can change nothing of what it matches: the model itself: it calls"),
    ],
)
def test_what_a_mod_leaves_is_told_by_what_it_was_asked_for(small, model, mod, says):
    ran = small(model, mod)
    assert ran.status == 2
    assert says in ran.err


def test_every_reason_of_one_forward_is_told_once_with_all_that_it_is_of(small):
    ran = small("deep", "{use: hard_swish}")
    assert ran.status == 2
    first = MODEL.splitlines().index("        x = torch.nn.functional.silu(x)") + 1
    layers = "'layers.0', 'layers.1', 'layers.2' and 2 more: it"
    assert f"{layers} calls F.silu at smallmodel.py:{first}, smallmodel.py:{first + 2}: write an nn module" in ran.err
    assert f"; {layers} multiplies by a sigmoid of what it multiplies at smallmodel.py:{first + 1} '" in ran.err


@pytest.mark.slow
def test_a_linear_with_a_hook_of_its_own_is_padded(small):
    ran = small("hooked", "{use: pad_alignment, match: up}")
    assert ran.status == 0, ran.err
    assert "pad_alignment (shop.yaml:6), the same function" in ran.out
