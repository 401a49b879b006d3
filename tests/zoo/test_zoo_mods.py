"""BlockNorm, and the Wukongs without biases, with BlockNorm and Hard Swish."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka import zoo
from loka.zoo.blocknorm import BlockNorm
from loka.zoo.wukong import LARGE, SMALL, mlp, norm


@pytest.mark.parametrize(("width", "block"), [(512, 256), (128, 128), (24, 8)])
def test_block_norm_normalises_each_block_on_its_own(width: int, block: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, width) * torch.linspace(0.1, 4.0, width)
    out = BlockNorm(block)(x)
    assert out.shape == x.shape
    for start in range(0, width, block):
        part = x[..., start : start + block].double()
        expected = part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(out[..., start : start + block].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("width", "block"), [(2048, 256), (256, 256), (128, 128)])
def test_blocks_are_of_256_or_of_the_whole_width(width: int, block: int) -> None:
    made = norm(width, mods=True)
    assert isinstance(made, BlockNorm)
    assert made.block == block
    assert isinstance(norm(width, mods=False), nn.LayerNorm)


def test_an_mlp_with_mods_is_of_linears_without_bias_block_norms_and_hard_swish() -> None:
    parts = mlp(4, 8, 2, mods=True)
    kinds = [type(part).__name__ for part in parts]
    assert kinds == ["Linear", "BlockNorm", "Hardswish", "Linear", "BlockNorm", "Hardswish", "Linear"]
    assert all(part.bias is None for part in parts if isinstance(part, nn.Linear))


@pytest.mark.parametrize(
    ("plain", "mods"), [(zoo.wukong_small, zoo.wukong_small_mods), (zoo.wukong_large, zoo.wukong_large_mods)]
)
def test_mods_change_norms_activations_and_biases_alone(plain, mods) -> None:
    with torch.device("meta"):
        one, other = plain(), mods()
    shapes = [[tuple(p.shape) for p in model.parameters() if p.dim() == 2] for model in (one, other)]
    assert shapes[0] == shapes[1]
    kinds = {type(module) for module in other.modules()}
    assert {BlockNorm, nn.Hardswish} <= kinds
    assert not {nn.LayerNorm, nn.SiLU} & kinds
    with_bias = [name for name, module in other.named_modules() if getattr(module, "bias", None) is not None]
    assert with_bias == ["head.out"]


def test_a_model_with_mods_takes_the_inputs_of_the_one_without() -> None:
    with torch.device("meta"):
        model = zoo.wukong_small_mods()
    assert model(zoo.wukong_small_inputs(2)[0].to("meta")).shape == (2, 1)
    assert not SMALL.mods
    assert not LARGE.mods
