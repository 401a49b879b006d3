"""Frozen weights on a Hopper GPU: compiled calls, and replayed CUDA graphs, use weights that were changed in place."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tests.support.codegen.policy_packages import policy_packages
from tests.support.gpu import ON_HOPPER
from tests.support.models.block_tower import POLICY, WIDTH, block_tower

pytestmark = ON_HOPPER


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_weights_changed_in_place_are_used(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()
    torch.manual_seed(0)
    model = block_tower().cuda().bfloat16().eval()
    x = torch.randn(256, WIDTH, device="cuda", dtype=torch.bfloat16)
    with policy_packages(tmp_path) as make, torch.no_grad():
        package = make(f"gen_frozen_{mode.replace('-', '_')}", POLICY)[2]
        own = copy.deepcopy(model)
        with package.apply(model, mode="infer") as patch:
            compiled = torch.compile(model, mode=mode)
            for _ in range(3):  # warms up, captures, replays
                before = compiled(x).clone()
            for each in (model, own):
                for parameter in each.parameters():
                    parameter.mul_(-1.5)
            made = compiled(x).clone()
            patch.verify(backward=False)
        with package.apply(own, mode="infer"):
            expected = own(x)
    assert (made - expected).float().norm() <= 0.05 * expected.float().norm()
    assert (made - before).float().norm() > 0.5 * expected.float().norm()
    torch.compiler.reset()
