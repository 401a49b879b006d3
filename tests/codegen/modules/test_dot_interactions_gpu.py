"""Dot interactions of a DLRM on a Hopper GPU: as near to float64 as the model is, in eager and compiled."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path

import pytest
import torch

from tests.support.codegen.policy_packages import Make
from tests.support.gpu import ON_HOPPER
from tests.support.models.dlrm_models import FUSED, POLICY, gradients, written

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("fresh_compiler")]


@pytest.mark.parametrize("sizes", [(27, 128), (9, 64)], ids=str)
def test_as_near_to_float64_as_the_model_is(package: Make, tmp_path: Path, sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)  # the bound is the model's own rounding, which of one sample varies
    name = written(tmp_path, FUSED["indices"], *sizes)
    policy = POLICY.format(module=name, compute="keep", mods="{use: fuse_interaction}")
    _, _, generated = package(f"gen_{name}", policy)
    model = importlib.import_module(name).Dlrm().cuda()
    for batch in (1031, 1):
        x = torch.randn(batch, 8, device="cuda")
        exact = gradients(copy.deepcopy(model).double(), x.double())
        with torch.autocast("cuda", torch.bfloat16):
            plain = gradients(model, x)
            with generated.apply(model):
                found, compiled = gradients(model, x), gradients(torch.compile(model, fullgraph=True), x)
        for right, theirs, *ours in zip(exact, plain, found, compiled, strict=True):
            bound = 1.2 * (theirs - right).norm() + 1e-3 * right.norm()
            assert all((each - right).norm() <= bound for each in ours)
