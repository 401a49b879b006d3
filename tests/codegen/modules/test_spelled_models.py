"""Models whose regions and joins go over several modules have them in kernels, and compute the same."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path

import pytest
import torch

from tests.support.codegen.policy_packages import Make

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU

HEAD = """import torch
import torch.nn.functional as F
from torch import nn

def inputs(batch):
    return (torch.randn(batch, 8, 32),)

class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(256, 64), nn.Linear(64, 128)

    def forward(self, x):
        return self.last(torch.relu(self.first(x.flatten(1)))).view(-1, 4, 32)

"""
NORM_OF_A_SUM = """class AddNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)

    def forward(self, x, y):
        return self.norm(x + y)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.add_norm = Tower(), AddNorm()

    def forward(self, x):
        return self.add_norm(x, torch.cat([self.tower(x), x[:, 4:]], 1))
"""
RESIDUAL_IN_A_PRODUCT = """class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.norm = Tower(), nn.LayerNorm(32)
        self.mix = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        mix = self.mix.unsqueeze(0).expand(x.size(0), -1, -1)
        return self.norm(torch.cat([self.tower(x) + x[:, :4], torch.baddbmm(x[:, 4:], mix, x)], 1))
"""
SUBCLASS = """class NormedLinear(nn.Linear):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.norm = nn.LayerNorm(o)

    def forward(self, x):
        return F.silu(self.norm(super().forward(x)))

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = NormedLinear(32, 32), NormedLinear(32, 32), nn.LayerNorm(32)

    def forward(self, x):
        return self.norm(torch.cat([self.second(self.first(x[:, :4])), x[:, 4:]], 1) + x)
"""
TAIL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""
POLICY = """version: 1
name: spelled
model: {{factory: "{0}:Model", inputs: "{0}:inputs", batch_size: 64}}
defaults: {{compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}}
rules: [{{match: "*.mix", compute: keep, optional: true}}]
mods: [{{use: fuse_interaction, optional: true}}]
"""
RELU, NORMED = ("linear", "relu"), ("linear", "layer_norm", "silu")


@pytest.mark.parametrize(
    ("layer", "region"), [(NORM_OF_A_SUM, RELU), (RESIDUAL_IN_A_PRODUCT, RELU), (SUBCLASS, NORMED)]
)
def test_joins_and_regions_over_several_modules(
    layer: str, region: tuple[str, ...], package: Make, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name = f"spelled_{request.node.callspec.indices['layer']}"
    (tmp_path / f"{name}.py").write_text(HEAD + layer + TAIL)
    plan, _, generated = package(f"gen_{name}", POLICY.format(name))
    assert not plan.skipped
    what = "layer_norm of 2 parts" if layer is RESIDUAL_IN_A_PRODUCT else "layer_norm of 2 parts and a residual"
    joins = [each.what for each in plan.interactions if what in each.what]
    assert len(joins) == (0 if layer is SUBCLASS else 2), plan.mods
    assert sum(site.region == region for site in plan.sites) == (4 if layer is SUBCLASS else 2)
    written = importlib.import_module(name)
    sys.modules.pop(name)
    torch.manual_seed(0)
    native = written.Model()
    patched, inputs = copy.deepcopy(native), written.inputs(16)
    with generated.apply(patched):
        error = patched(*inputs) - native(*inputs)
    assert error.norm() <= 0.1 * native(*inputs).norm()
