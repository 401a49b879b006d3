"""Chains whose rows no program holds whole, on a Hopper GPU."""

from __future__ import annotations

import copy

import pytest

from tests.support.codegen import chain_plans as chains
from tests.support.codegen.wide_chains import RECIPES, Made, wide_chains, wide_operands
from tests.support.gpu import ON_HOPPER

pytestmark = ON_HOPPER


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A package and the layers that it is for, by recipe."""
    return wide_chains(tmp_path_factory.mktemp)


@pytest.mark.parametrize("rows", [96, 1000])
@pytest.mark.parametrize("recipe", RECIPES)
def test_against_float64_on_a_gpu(made: Made, recipe: str, rows: int) -> None:
    package, body = made(recipe)
    x, dy = wide_operands(rows, "cuda")
    layers = copy.deepcopy(body).cuda()
    exact = chains.gradients(chains.Holder(copy.deepcopy(layers).double()), x.double(), dy.double())
    model = chains.Holder(layers.bfloat16())
    with package.apply(model) as patch:
        found = chains.gradients(model, x.bfloat16(), dy.bfloat16())
        patch.verify()
    errors = {key: chains.error(value, exact[key]) for key, value in found.items()}
    assert max(errors.values()) < (0.03 if recipe == "plain" else 0.2), errors
