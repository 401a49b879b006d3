"""`fuse_interaction` and `residual_high_precision` on a Hopper GPU: against float64, compiled, and captured."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.support.codegen import chain_plans as chains
from tests.support.codegen.modded_models import Workplace
from tests.support.gpu import ON_HOPPER

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("fresh_compiler")]

FUSED, HIGH = "{use: fuse_interaction}", "{use: residual_high_precision}"
CARRIED = [("dcn", HIGH), ("wukong", HIGH), ("wukong", f"{HIGH}, {FUSED}")]
TRANSPOSED = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always"
RULES = "{match: {max_n: 32}, compute: keep}, {match: {max_k: 32}, compute: keep, optional: true}"
BATCH = 1031


def model_of(workplace: Workplace, kind: str) -> tuple[nn.Module, Tensor]:
    sizes = {"kind": kind, "embeddings": 32, "dim": 64, "layers": 3, "rank": 16}
    workplace.models.SIZES.update(sizes)
    return workplace.models.sized().cuda().bfloat16(), torch.randn(BATCH, 32, 64, device="cuda").bfloat16()


@pytest.mark.parametrize(("kind", "mods"), [("wukong", FUSED), *CARRIED])
@pytest.mark.parametrize("defaults", ["compute: keep", TRANSPOSED])
def test_as_near_to_float64_as_the_model_is(workplace: Workplace, kind: str, mods: str, defaults: str) -> None:
    model, x = model_of(workplace, kind)
    _, _, package = workplace.make("sized", defaults, mods, "sized_inputs", RULES)
    dy = torch.randn(BATCH, 1, device="cuda")
    exact = chains.gradients(copy.deepcopy(model).double(), x.double(), dy.double())
    plain = chains.gradients(model, x, dy.bfloat16())
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy.bfloat16())
        again = chains.gradients(torch.compile(model, fullgraph=True), x, dy.bfloat16())
        patch.verify()
    limit = 0.2 if "fp8" in defaults else 0.02
    for key, value in found.items():
        bound = 1.5 * chains.error(plain[key], exact[key]) + limit
        assert chains.error(value, exact[key]) < bound, key
        assert chains.error(again[key], exact[key]) < bound, key


@pytest.mark.parametrize(("kind", "mods"), CARRIED)
def test_a_captured_step_gives_what_a_step_gives(workplace: Workplace, kind: str, mods: str) -> None:
    model, x = model_of(workplace, kind)
    _, _, package = workplace.make("sized", mods=mods, inputs="sized_inputs")
    parameters = list(model.parameters())

    def step() -> list[Tensor]:
        y = model(x)
        return [y, *torch.autograd.grad(y.float().square().mean(), parameters)]

    with package.apply(model):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            expected = step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        graph.replay()
        for one, other in zip(expected, captured, strict=True):
            assert torch.equal(one, other)
