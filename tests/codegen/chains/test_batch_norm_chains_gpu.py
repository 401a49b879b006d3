"""BatchNorms in chains on a Hopper GPU: against float64, and in CUDA graphs with their running statistics."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.support.codegen import chain_plans as chains
from tests.support.codegen.codegen_plans import PlanPackage
from tests.support.gpu import ON_HOPPER
from tests.support.models.batch_norm_models import seeded

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("fresh_compiler")]

RECIPES = {"as_is": chains.AS_IS, "fp8": chains.CHAIN}


def tower(width: int, activation: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, width), nn.BatchNorm1d(width), activation,
        nn.Linear(width, width), nn.BatchNorm1d(width), nn.SiLU(), nn.Linear(width, width),
    )  # fmt: skip


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.2)], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("width", "rows"), [(256, 4093), (1024, 8192), (1100, 512)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_against_float64(
    planned: PlanPackage, recipe: str, width: int, rows: int, training: bool, activation: nn.Module
) -> None:
    torch.manual_seed(0)
    body = seeded(tower(width, activation))
    package = planned(chains.chain_plan(body, RECIPES[recipe], lambda batch: torch.randn(batch, width)))
    model = chains.Holder(body).cuda().bfloat16().train(training)
    exact = chains.Holder(chains.simulated(model.body) if recipe == "fp8" else copy.deepcopy(model.body).double())
    x, dy = chains.gpu_operands(rows, width)
    expected = chains.gradients(exact, x.double(), dy.double())
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
    without = {"body.0.bias", "body.3.bias"} if training else set()  # zero, and rounding in float64
    errors = {key: chains.error(found[key], wanted) for key, wanted in expected.items() if key not in without}
    assert max(errors.values()) < 0.1, errors
    assert all(not found[key].any() for key in without)
    for (name, buffer), wanted in zip(model.named_buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(buffer.double(), wanted.double(), rtol=2e-2, atol=2e-2, msg=name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_replayed_steps_move_the_running_statistics(planned: PlanPackage, recipe: str) -> None:
    torch.manual_seed(0)
    body = seeded(tower(512, nn.ReLU()))
    package = planned(chains.chain_plan(body, RECIPES[recipe], lambda batch: torch.randn(batch, 512)))
    eager = chains.Holder(body).cuda()
    replayed = copy.deepcopy(eager)
    with package.apply(eager), package.apply(replayed):
        compiled = torch.compile(replayed, mode="reduce-overhead", fullgraph=True)
        for step in range(6):
            x, dy = chains.gpu_operands(1024, 512, seed=step)
            for model in (eager, compiled):
                model.zero_grad(set_to_none=True)  # a replay writes where the gradients of the last one are
                with torch.autocast("cuda", torch.bfloat16):
                    y = model(x.float())
                y.backward(dy.to(y.dtype))
    for (name, buffer), wanted in zip(replayed.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(buffer, wanted, rtol=1e-2, atol=1e-2, msg=name)
