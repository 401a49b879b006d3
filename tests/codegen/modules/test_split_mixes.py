"""Mixing layers whose matrices are one Parameter: fused where it is kept, one FP8 GEMM where it is not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.support.codegen.policy_packages import Make

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU


class Layer(nn.Module):
    """(B, 16, 32) -> (B, 16, 32); the first 8 rows of `both` are the rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.norm = nn.Parameter(torch.randn(16, 16) / 4), nn.LayerNorm(32)
        self.fc, self.out = nn.Linear(128, 256), nn.Linear(512, 16)

    def forward(self, x: Tensor) -> Tensor:
        ranked, summed = torch.split(self.both @ x, [8, 8], dim=1)
        pairs = (x @ ranked.mT).flatten(1)
        x = self.norm(torch.cat([self.fc(pairs).view(-1, 8, 32), summed], 1) + x)
        made: Tensor = self.out(x.flatten(1))
        return made


def inputs(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 16, 32, generator=torch.Generator().manual_seed(1)),)


@pytest.fixture
def make(package: Make) -> Make:
    return lambda name, rules: package(
        name,
        f'version: 1\nname: mixes\nmodel: {{factory: "{__name__}:Layer", inputs: "{__name__}:inputs", '
        "batch_size: 64}\ndefaults: {compute: fp8, scaling: rowwise}\n"
        f"{rules}mods: [{{use: fuse_interaction}}]\n",
    )


@pytest.mark.parametrize("kept", [True, False])
def test_both_matrices_in_one_parameter(make: Make, kept: bool) -> None:
    plan, files, package = make(f"gen_split_{kept}", "rules: [{match: both, compute: keep}]\n" if kept else "")
    (both,) = (site for site in plan.sites if site.site.name == "both")
    assert both.fp8 is not kept
    text = files["modules.py"]
    assert ("self.both[0:8].t(), self.both[8:16]" in text) is kept
    assert ("torch.split(" in text) is not kept
    if not kept:
        reasons = [each.reason for mod in plan.mods for each in mod.unchanged]
        assert reasons == [
            "its mixing layer multiplies by 'both' in FP8, and kernels mix in the model's dtype: keep that site "
            "(compute: keep)"
        ]
    torch.manual_seed(0)
    plain = Layer()
    patched = copy.deepcopy(plain)
    (x,) = inputs(33)
    with package.apply(patched):
        found, expected = patched(x), plain(x)
        assert (found - expected).norm() <= 0.12 * expected.norm()
        ours, theirs = (
            torch.autograd.grad(y.square().sum(), m.both)[0] for y, m in ((found, patched), (expected, plain))
        )
        assert (ours - theirs).norm() <= 0.2 * theirs.norm()
