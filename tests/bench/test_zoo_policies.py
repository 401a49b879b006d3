"""The models that `loka bench model` knows by name, as policies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from loka import zoo
from loka.bench.model.zoo_policies import ZOO, zoo_policy
from loka.mods.modded_model import built_model
from loka.mods.norms import BlockNorm
from loka.mods.policy_loader import load_policy
from loka.plan.planner import make_plan
from loka.policy.policy import Policy


def policy_of(name: str, folder: Path, batch: int | None = None) -> Policy:
    path = folder / f"{name}.yaml"
    path.write_text(zoo_policy(name).replace(f"batch_size: {ZOO[name].batch}", f"batch_size: {batch or 2}"))
    return load_policy(path)


def test_factories_and_inputs_are_there() -> None:
    for model in ZOO.values():
        for name in (model.factory, f"{model.factory}_inputs"):
            assert callable(getattr(zoo, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wukong_small", "wukong_small_mods", "dcnv2"])  # the large ones take long to build
def test_policies_build_their_models_with_inputs_that_ask_for_gradients(name: str, tmp_path: Path) -> None:
    built, adapted = built_model(policy_of(name, tmp_path))
    assert all(value.requires_grad for value in built.args)
    model = built.module.to("meta")
    assert model(*(value.detach().to("meta") for value in built.args)).shape == (2, 1)
    assert bool(adapted.adaptations) == name.endswith("_mods")


@pytest.mark.slow
def test_mods_change_norms_activations_and_biases_alone(tmp_path: Path) -> None:
    one, other = (built_model(policy_of(name, tmp_path))[0].module for name in ("wukong_small", "wukong_small_mods"))
    shapes = [{n: tuple(p.shape) for n, p in model.named_parameters() if p.dim() == 2} for model in (one, other)]
    assert shapes[0] == shapes[1]
    kinds = {type(module) for module in other.modules()}
    assert {BlockNorm, nn.Hardswish} <= kinds
    assert not {nn.LayerNorm, nn.SiLU} & kinds
    with_bias = [name for name, module in other.named_modules() if getattr(module, "bias", None) is not None]
    assert with_bias == ["head.out"]
    blocks = {name: part.block for name, part in other.named_modules() if isinstance(part, BlockNorm)}
    assert len(blocks) == 19
    assert {name for name, block in blocks.items() if block != 256} == {f"layers.{index}.norm" for index in range(4)}
    assert blocks["layers.0.norm"] == 128


@pytest.mark.slow
def test_a_model_of_the_zoo_is_planned_in_fp8_with_a_gradient_of_its_inputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plan = make_plan(policy_of("dcnv2", tmp_path, 32))
    by_name = {each.site.name: each for each in plan.sites}
    assert [gemm.fp8 for gemm in by_name["cross.0.down"].gemms] == [True] * 3
    assert [name for name, each in by_name.items() if not each.fp8] == ["over.8"]  # one output
