"""`torch.addmm` with a residual, in FP8: the model's dtype, also where autocast casts the residual."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.support.codegen.policy_packages import Make

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(64, 64) * 0.1), nn.Parameter(torch.randn(64, 64) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(x, torch.addmm(x, x, self.first.t()).relu(), self.second)


def inputs(batch: int) -> tuple[Tensor, ...]:
    return (torch.randn(batch, 64),)


@pytest.mark.parametrize("recipe", ["", ", power_of_two: true, requantize_transpose: true"])
def test_a_residual_in_the_call_of_its_product(recipe: str, package: Make) -> None:
    plan, _, generated = package(
        f"gen_residual_{len(recipe)}",
        f'version: 1\nname: residual\nmodel: {{factory: "{__name__}:Residual", inputs: "{__name__}:inputs", '
        f"batch_size: 64}}\ndefaults: {{compute: fp8, scaling: rowwise, fuse: always{recipe}}}\n",
    )
    assert [site.fp8 for site in plan.sites] == [True, True]
    torch.manual_seed(0)
    native = Residual()
    patched = copy.deepcopy(native)
    (x,) = inputs(16)
    with generated.apply(patched) as patch:
        expected, found = native(x), patched(x)
        assert 0 < (found - expected).norm() <= 0.1 * expected.norm()
        with torch.autocast("cpu", torch.bfloat16):
            assert patched(x).dtype == native(x).dtype == torch.bfloat16
        found.sum().backward()
        patch.verify()
