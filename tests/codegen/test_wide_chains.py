"""Chains whose rows no program holds whole, as the input's and as a product's: on the CPU, and on a Hopper GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from loka.codegen import render_package
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans

WIDTH = 16640
RECIPES = {"fp8": chains.CHAIN, "known": chains.known_chain(x=16.0, dy=64.0), "plain": chains.AS_IS}
Made = Callable[[str], tuple[ModuleType, nn.Module]]

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A package and the layers that it is for, by recipe; each is generated once."""
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
            folder: Path = tmp_path_factory.mktemp(name)
            known[recipe] = plans.import_package(render_package(plan), folder, name), body
        return known[recipe]

    return make


def operands(rows: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, dy = torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, 32, generator=generator)
    return x.to(device), dy.to(device)


def test_one_chain_with_kernels_in_chunks(made: Made) -> None:
    kernels = Path(made("fp8")[0].__file__ or "").with_name("triton_kernels.py").read_text(encoding="utf-8")
    for function in (
        "layer_norm_e4m3_16640", "layer_norm_backward_16640", "add_layer_norm_silu_e4m3_16640",
        "add_layer_norm_silu_backward_e4m3_16640", "quantise_e4m3_16640",
    ):  # fmt: skip
        assert f"def {function}(" in kernels
    assert "tl.range(0, 16640, 4096" in kernels


def test_against_simulated_quantisation(made: Made) -> None:
    package, body = made("fp8")
    x, dy = operands(9, "cpu")
    expected = chains.gradients(chains.Holder(chains.simulated(body)), x.double(), dy.double())
    model = chains.Holder(copy.deepcopy(body))
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
    errors = {key: chains.error(value, expected[key]) for key, value in found.items()}
    # Sums of 16640 products round differently, and one of the 432 values between that falls another way shows.
    assert max(errors.values()) < 0.03, errors


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("rows", [96, 1000])
@pytest.mark.parametrize("recipe", RECIPES)
def test_against_float64_on_a_gpu(made: Made, recipe: str, rows: int) -> None:
    package, body = made(recipe)
    x, dy = operands(rows, "cuda")
    layers = copy.deepcopy(body).cuda()
    exact = chains.gradients(chains.Holder(copy.deepcopy(layers).double()), x.double(), dy.double())
    model = chains.Holder(layers.bfloat16())
    with package.apply(model) as patch:
        found = chains.gradients(model, x.bfloat16(), dy.bfloat16())
        patch.verify()
    errors = {key: chains.error(value, exact[key]) for key, value in found.items()}
    assert max(errors.values()) < (0.03 if recipe == "plain" else 0.2), errors
