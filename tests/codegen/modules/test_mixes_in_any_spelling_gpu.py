"""Mixing layers in random spellings on a Hopper GPU: against float64, eager and compiled."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path

import pytest
import torch

from tests.support.codegen import chain_plans as chains
from tests.support.codegen.policy_packages import Make
from tests.support.gpu import ON_HOPPER
from tests.support.spellings.mixing_layers import INPUTS, gradients, mixing_module

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("fresh_compiler")]

SIZES = (32, 64, 16, 8)
BATCH = 1031


@pytest.mark.parametrize("seed", range(12))
def test_spelled_layers_are_as_near_to_float64_as_the_model_is(seed: int, package: Make, tmp_path: Path) -> None:
    n, d, r, c = SIZES
    name = f"spelled_on_gpu_{seed}"
    (tmp_path / f"{name}.py").write_text(mixing_module(seed, SIZES) + INPUTS.format(n=n, d=d))
    _, files, generated = package(
        f"gen_{name}",
        f'version: 1\nname: spelled\nmodel: {{factory: "{name}:Layer", inputs: "{name}:inputs", batch_size: 32}}\n'
        "defaults: {compute: keep, fuse: always}\nmods: [{use: fuse_interaction}]\n",
    )
    assert "fm_interaction" in files["modules.py"]
    model = importlib.import_module(name).Layer().cuda().bfloat16()
    sys.modules.pop(name)
    x = torch.randn(BATCH, n, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(BATCH, n * r + c * d, device="cuda", dtype=torch.bfloat16)
    exact = dict(gradients(copy.deepcopy(model).double(), x.detach().double().requires_grad_(), dy.double()))
    plain = dict(gradients(model, x, dy))
    with generated.apply(model):
        found = gradients(model, x, dy)
        compiled = gradients(torch.compile(model, fullgraph=True), x, dy)
    for key, value in (*found, *compiled):
        what = key.removeprefix("_orig_mod.")
        assert chains.error(value, exact[what]) < 1.5 * chains.error(plain[what], exact[what]) + 0.02, key
