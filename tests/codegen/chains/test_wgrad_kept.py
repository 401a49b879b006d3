"""Chains in which the wgrad of some linears stays in the model's dtype."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor, nn

from loka.codegen import render_package
from loka.kernels import call_counters
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.models import sum_models as sums

KEPT = {**chains.CHAIN, "wgrad": None}


class Pair(nn.Module):
    """A wgrad that is kept behind a plain product, and one whose operands the chain has in FP8 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 24, bias=False)
        self.down = nn.Linear(24, 40, bias=False)
        self.second = nn.Linear(40, 48)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.down(self.first(x))))
        return out


def bodies() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"crosses": sums.Crosses(), "apart": sums.Apart(), "residuals": sums.Residuals(), "pair": Pair()}


BODIES = bodies()


def recipe(name: str) -> dict[str, object]:
    return KEPT if "down" in name else chains.CHAIN


class KeptWgrad(chains.Simulated):
    """`Simulated` with an exact wgrad."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x = x  # type: ignore[attr-defined]
        out: Tensor = chains.Simulated.forward(ctx, x, weight)
        return out

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> tuple[Tensor, Tensor]:
        dx, _ = chains.Simulated.backward(ctx, dy)
        return dx, dy.t() @ ctx.x  # type: ignore[attr-defined]


def simulated(body: nn.Module) -> nn.Module:
    made = chains.simulated(body)
    for name, child in made.named_modules():
        if isinstance(child, nn.Linear) and "down" in name:
            child.forward = lambda x, weight=child.weight: KeptWgrad.apply(x, weight)
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[object, str]]:
    found = {}
    for name, body in BODIES.items():
        files = render_package(chains.chain_plan(body, recipe))
        package = plans.import_package(files, tmp_path_factory.mktemp(name), f"gen_kept_{name}")
        found[name] = package, files["kernels.py"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
def test_gradients_against_float64(made, name: str) -> None:
    torch.manual_seed(1)
    package, _ = made[name]
    body = copy.deepcopy(BODIES[name])
    x = torch.randn(33, 48)
    dy = torch.randn_like(body(x))
    expected = chains.gradients(chains.Holder(simulated(body)), x.double(), dy.double())
    model = chains.Holder(body)
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
        counts = {label: call_counters.count(number) for number, label in patch._labels()}
    assert counts == {(site, gemm): 0 if "down" in site and gemm == "wgrad" else 1 for site, gemm in counts}
    for key, value in found.items():
        assert chains.error(value, expected[key]) < 5e-3, key
    with package.apply(model, mode="infer"), torch.no_grad():
        assert torch.equal(model(x), found["y"])
        assert model(x[:0]).shape[0] == 0


def test_the_input_is_not_transposed_and_the_kept_sum_is_read_again(made) -> None:
    _, text = made["crosses"]
    (body,) = [part for part in text.split("\nclass ") if part.startswith("BodyFunction")]
    assert "x_fp8_2, x_scale_2, _, sum_1 = fused.add_times_residual_keep_e4m3(" in body
    assert re.search(r"dweight_2 = \(grad\.t\(\) @ sum_1\.to\(grad\.dtype\)\)\.to\(weight_dtype_2\)", body)
    assert len(re.findall(r"fused\.requantize_transpose_1\(\*weight_fp8", body)) == 3
    saved = body[body.index("dispatch.save_for_backward(") : body.index("ctx.dtypes")]
    assert "x_fp8_2" not in saved
    assert "x_fp8_3" in saved


def test_a_site_whose_operands_are_in_fp8_alone_is_no_part_of_the_chain(made) -> None:
    """`down` of Pair is followed by a ReLU: its output gradient is made in FP8 only, so it ends the chain before it."""
    _, text = made["pair"]
    said = chains.functions(text)
    assert said["body_first"].startswith("linear: x (..., 48), weight (24, 48) ->")
    assert said["body_second"].startswith("linear: x (..., 40), weight (48, 40) ->")
    assert not any(each.count("linear") == 4 for each in chains.functions(made["residuals"][1]).values())
    assert chains.functions(made["crosses"][1])["body"].count("linear") == 7


@pytest.mark.slow
def test_compiled_and_partly_without_gradients(made) -> None:
    package, _ = made["crosses"]
    model = chains.Holder(copy.deepcopy(BODIES["crosses"]))
    try:
        with package.apply(model):
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
            for rows in (6, 11):
                x, dy = torch.randn(rows, 48), torch.randn(rows, 32)
                expected, found = chains.gradients(model, x, dy), chains.gradients(compiled, x, dy)
                for key, value in expected.items():
                    torch.testing.assert_close(found.get(key, found.get(f"_orig_mod.{key}")), value)
            model.body.cross[1].down.weight.requires_grad_(False)
            model.zero_grad()
            model(x).backward(dy)
            assert model.body.cross[1].down.weight.grad is None
            assert torch.equal(model.body.cross[0].down.weight.grad, expected["body.cross.0.down.weight"])
    finally:
        torch._dynamo.reset()
