"""Products whose axes LoKA moves stay contiguous where torch's are and a view reads them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.support.codegen.policy_packages import Make

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU

POLICY = """\
version: 1
name: viewed
model: {{factory: "tests.codegen.modules.test_views_of_products:{model}", inputs: "{module}:inputs", batch_size: 64}}
defaults: {{compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}}
"""


class MatrixFirst(nn.Module):
    """W @ x (B, 32, 64), which torch makes contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(32, 64) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.w, x)


class ViewedInside(MatrixFirst):
    """Takes a view in the same forward."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.w, x).view(x.shape[0], -1)


class ViewedOutside(nn.Module):
    """Takes views of what other modules return."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.out = inner, nn.Linear(32 * 64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.inner(x))
        if not isinstance(y, Tensor):  # which keeps this forward as it is
            raise TypeError
        return self.out(y.view(x.shape[0], -1))


def matrix_first() -> nn.Module:
    return ViewedOutside(MatrixFirst())


def convolution() -> nn.Module:
    return ViewedOutside(nn.Conv1d(64, 32, 1))


def viewed_inside() -> nn.Module:
    return nn.Sequential(ViewedInside(), nn.Linear(32 * 64, 64))


def inputs(batch: int) -> tuple[Tensor]:
    return (torch.randn(batch, 64, 64),)


@pytest.mark.parametrize("model", [matrix_first, convolution, viewed_inside], ids=lambda model: model.__name__)
def test_a_view_of_a_product_in_fp8(model, package: Make) -> None:
    plan, _, generated = package(model.__name__, POLICY.format(model=model.__name__, module=__name__))
    assert [site.site.name for site in plan.sites if not site.fp8] == []
    native = model()
    patched = copy.deepcopy(native)
    (x,) = inputs(8)
    with generated.apply(patched) as patch:
        found = patched(x)
        found.square().mean().backward()
        patch.verify()
    assert (found - native(x)).norm() <= 0.15 * native(x).norm()
