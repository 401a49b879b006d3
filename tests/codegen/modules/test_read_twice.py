"""Chains of modules that are called twice, and of tied Parameters: no function takes one tensor in two places.

torch.compile refuses an autograd function that is given the same tensor twice.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.support.codegen import chain_plans as chains
from tests.support.codegen.policy_packages import Make

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU


class Net(nn.Module):
    """Linears of which one is called twice, a norm that is, and tied weights."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))
        self.norm = nn.LayerNorm(64)
        if form == "tied":
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "linear":
            return self.c(self.a(torch.relu(self.a(x))))
        if self.form == "norm":
            return self.c(self.norm(self.b(self.norm(self.a(x)))))
        if self.form == "around":
            return self.c(self.norm(self.a(self.norm(x))))
        return self.c(self.b(torch.relu(self.a(x))))


def inputs(batch: int) -> tuple[Tensor]:
    return (torch.randn(batch, 64),)


linear, norm, around, tied = (partial(Net, form) for form in ("linear", "norm", "around", "tied"))
FP8 = "compute: fp8, power_of_two: true, requantize_transpose: true, fuse: always"


@pytest.mark.slow
@pytest.mark.parametrize("defaults", [FP8, "compute: keep, fuse: always"])
@pytest.mark.parametrize("form", ["linear", "norm", "around", "tied"])
def test_it_compiles_whole_and_gives_what_it_gives_in_eager(package: Make, form: str, defaults: str) -> None:
    name = f"read_twice_{form}_{'fp8' in defaults}"
    _, _, generated = package(
        name,
        f'version: 1\nname: {name}\nmodel: {{factory: "{__name__}:{form}", inputs: "{__name__}:inputs", '
        f"batch_size: 32}}\ndefaults: {{{defaults}}}\n",
    )
    torch.manual_seed(0)
    model = Net(form)
    x, dy = torch.randn(9, 64), torch.randn(9, 64)
    own = chains.gradients(copy.deepcopy(model), x, dy)
    with generated.apply(model) as patch:
        eager = chains.gradients(model, x, dy)
        patch.verify()
        compiled = chains.gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), x, dy)
    assert eager.keys() == compiled.keys() == own.keys()
    limit = 0.35 if "fp8" in defaults else 1e-5
    for name, value in eager.items():
        assert torch.equal(value, compiled[name])
        assert (value - own[name]).norm() <= limit * own[name].norm()
