"""Chains on a GPU whose weights FSDP has gathered in FP8: the bits of chains that quantize them, also compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from generated.ranker import fused, kernels
from loka.dispatch.shard.gathered_weight import GatheredWeight
from loka.kernels import call_counters
from tests.support.gpu import ON_HOPPER

pytestmark = ON_HOPPER

WIDTH = 2048


def weight_of(weight: Tensor) -> nn.Parameter:
    """A leaf as FSDP2 makes it of gathered FP8 values."""
    fp8, scale, _ = fused.quantize_weights([weight])
    return nn.Parameter(GatheredWeight(fp8, scale, weight.shape, weight.dtype))


def results(gathered: tuple[bool, ...], compiled: bool, rows: int, device: str = "cuda") -> list[Tensor]:
    """The result of the head of the ranker, and the gradients of its input and its tensors."""
    torch.compiler.reset()
    torch.manual_seed(0)
    x = torch.randn(rows, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    groups: list[tuple[nn.Parameter, ...]] = []
    for is_gathered in gathered:
        weight = torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) / 45
        vectors = [nn.Parameter(torch.randn(WIDTH, device=device, dtype=torch.bfloat16)) for _ in range(3)]
        groups.append((weight_of(weight) if is_gathered else nn.Parameter(weight), *vectors))
    numbers = tuple(call_counters.new_counters(3) for _ in groups)

    def run(x: Tensor) -> Tensor:
        return kernels.head_mlp(x, *groups, numbers)

    y = (torch.compile(run, fullgraph=True) if compiled else run)(x)
    y.backward(torch.randn_like(y))
    return [y.detach(), x.grad, *[parameter.grad for group in groups for parameter in group]]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rows", [48, 1024])
def test_gathered_weights_change_no_bit(rows, compiled):
    expected = results((False, False, False), compiled, rows)
    for gathered in ((True, True, True), (False, True, False)):
        found = results(gathered, compiled, rows)
        assert all(type(each) is Tensor for each in found)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
