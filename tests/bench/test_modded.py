"""The zoo's Wukongs with the paper's mods, as `loka bench model` measures them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka import zoo
from loka.bench.speed.model_speed import MODELS
from loka.bench.subjects.modded import with_mods
from loka.mods.mod_modules import BlockNorm


@pytest.mark.slow
@pytest.mark.parametrize("size", ["small", "large"])
def test_mods_change_norms_activations_and_biases_alone(size: str) -> None:
    with torch.device("meta"):
        one, other = MODELS[f"wukong_{size}"].build(), MODELS[f"wukong_{size}_mods"].build()
    shapes = [{n: tuple(p.shape) for n, p in model.named_parameters() if p.dim() == 2} for model in (one, other)]
    assert shapes[0] == shapes[1]
    kinds = {type(module) for module in other.modules()}
    assert {BlockNorm, nn.Hardswish} <= kinds
    assert not {nn.LayerNorm, nn.SiLU} & kinds
    with_bias = [name for name, module in other.named_modules() if getattr(module, "bias", None) is not None]
    assert with_bias == ["head.out"]


def test_blocks_are_of_256_or_of_the_whole_width() -> None:
    with torch.device("meta"):
        model = MODELS["wukong_small_mods"].build()
    blocks = {name: part.block for name, part in model.named_modules() if isinstance(part, BlockNorm)}
    assert len(blocks) == 19
    assert {name for name, block in blocks.items() if block != 256} == {f"layers.{index}.norm" for index in range(4)}
    assert blocks["layers.0.norm"] == 128


@pytest.mark.slow
def test_the_weights_are_those_of_the_model_without_mods() -> None:
    made = []
    for build in (zoo.ranker, lambda: with_mods(zoo.ranker, zoo.ranker_inputs)):
        torch.manual_seed(3)
        made.append(dict(build().named_parameters()))
    assert set(made[1]) < set(made[0])
    assert all(torch.equal(value, made[0][name]) for name, value in made[1].items())
