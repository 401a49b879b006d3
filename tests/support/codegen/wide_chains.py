"""Chains whose rows no program holds whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from loka.codegen import render_package
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans

WIDTH = 16640
RECIPES = {"fp8": chains.CHAIN, "known": chains.known_chain(x=16.0, dy=64.0), "plain": chains.AS_IS}
Made = Callable[[str], tuple[ModuleType, nn.Module]]


def wide_chains(make_folder: Callable[[str], Path]) -> Made:
    """Gives a package and the layers that it is for, by recipe; each is generated once, in a folder of its own."""
    known: dict[str, tuple[ModuleType, nn.Module]] = {}

    def make(recipe: str) -> tuple[ModuleType, nn.Module]:
        if recipe not in known:
            torch.manual_seed(0)
            body = nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.LayerNorm(48),
                nn.Linear(48, WIDTH), nn.LayerNorm(WIDTH), nn.SiLU(), nn.Linear(WIDTH, 32),
            )  # fmt: skip
            plan = chains.chain_plan(body, RECIPES[recipe], lambda batch: torch.randn(batch, WIDTH))
            name = f"gen_wide_{recipe}"
            known[recipe] = plans.import_package(render_package(plan), make_folder(name), name), body
        return known[recipe]

    return make


def wide_operands(rows: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, dy = torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, 32, generator=generator)
    return x.to(device), dy.to(device)
