"""Generated chains with BlockNorm on a Hopper GPU: against float64, and compiled as one graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from loka.codegen import render_package
from loka.mods.norms import BlockNorm
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.gpu import ON_HOPPER

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("fresh_compiler")]


@pytest.mark.parametrize("recipe", [chains.CHAIN, chains.AS_IS], ids=["fp8", "plain"])
@pytest.mark.parametrize("width", [512, 2048])
def test_against_float64_and_under_the_compiler(recipe, width, tmp_path):
    torch.manual_seed(0)
    tower = chains.Tower(width, width, norm=lambda _: BlockNorm(), activation=nn.Hardswish, bias=False)
    plan = chains.chain_plan(tower, recipe, lambda batch: torch.randn(batch, width))
    kind = "fp8" if recipe is chains.CHAIN else "plain"
    package = plans.import_package(render_package(plan), tmp_path, f"gen_gpu_blocks_{kind}_{width}")
    body = copy.deepcopy(tower).cuda().bfloat16()
    x, dy = chains.gpu_operands(4096, width)
    exact = chains.simulated(body) if kind == "fp8" else copy.deepcopy(body).double()
    expected = chains.gradients(chains.Holder(exact), x.double(), dy.double())
    model = chains.Holder(copy.deepcopy(body))
    with package.apply(model) as patch:
        found = chains.gradients(model, x.bfloat16(), dy.bfloat16())
        compiled = torch.compile(model, fullgraph=True)
        again = chains.gradients(compiled, x.bfloat16(), dy.bfloat16())
        patch.verify()
    for key, value in found.items():
        assert chains.error(value, expected[key]) < (0.06 if kind == "fp8" else 0.02), key
        assert chains.error(again[key], value) < 0.02, key
