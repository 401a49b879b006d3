"""Policies that turn operands, from the file to training: planned, generated, bound, trained on the CPU, verified."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.numerics.enums import OPERANDS, Gemm, Operand
from loka.numerics.metrics import sqnr
from loka.numerics.quantize import dequantize, quantize, requantize_transpose
from loka.numerics.recipe import OperandRecipe
from loka.plan.plan import Plan
from tests.support.codegen.policy_packages import Make

SHORTEST = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true"
# what `defaults` says, and the operands that it transposes, of a site whose input needs a gradient
POLICIES = {
    "shortest": (SHORTEST, 3),
    "wgrad alone": (f"{SHORTEST}, dgrad: {{requantize_transpose: false}}", 2),
    "dgrad alone": (f"{SHORTEST}, wgrad: {{requantize_transpose: false}}", 1),
    "e5m2 gradients": (f"{SHORTEST}, dgrad: {{grad_output: {{format: e5m2}}}}", 3),
    "transposed beside rowwise": (f"{SHORTEST}, wgrad: {{grad_output: {{requantize_transpose: false}}}}", 2),
    "transposed beside tensorwise": (
        f"{SHORTEST}, dgrad: {{requantize_transpose: false}}, "
        "wgrad: {scaling: tensorwise, input: {requantize_transpose: false}}",
        1,
    ),
    "fast accumulation": (f"{SHORTEST}, accumulation: fast", 3),
}


class Tower(nn.Module):
    """A tower whose first linear is fed by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 64)
        self.body = nn.Sequential(
            nn.LayerNorm(64), nn.Linear(64, 96), nn.LayerNorm(96), nn.SiLU(), nn.Linear(96, 64, bias=False)
        )
        self.rank = nn.Parameter(torch.randn(32, 64) / 8)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        out: Tensor = self.head(F.linear(y + self.body(y), self.rank).relu())
        return out


class Alone(nn.Module):
    """A linear alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(48))
        self.linear = nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x * self.gain)
        return out


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Tower() if name == "tower" else Alone()


tower, alone = (partial(model_of, name) for name in ("tower", "alone"))


def tower_inputs(batch: int) -> tuple[Tensor]:
    return (torch.randn(batch, 40),)


def alone_inputs(batch: int) -> tuple[Tensor]:
    return (torch.randn(batch, 48),)


pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU

Transposed = Callable[[str, str], tuple[Plan, ModuleType]]


@pytest.fixture
def make(package: Make) -> Transposed:
    """The plan of a policy with these defaults for a model above, and its package."""

    def one(model: str, defaults: str) -> tuple[Plan, ModuleType]:
        plan, _, generated = package(
            f"gen_transposed_{model}",
            f'version: 1\nname: transposed\nmodel: {{factory: "{__name__}:{model}", '
            f'inputs: "{__name__}:{model}_inputs", batch_size: 64}}\ndefaults: {{{defaults}}}\n',
        )
        return plan, generated

    return one


def recipes(plan: Plan, site: str) -> dict[tuple[Gemm, Operand], OperandRecipe]:
    (found,) = (each for each in plan.sites if each.site.name == site)
    return {
        (gemm.gemm, operand): recipe
        for gemm in found.gemms
        if gemm.operands is not None
        for operand, recipe in zip(OPERANDS[gemm.gemm], gemm.operands, strict=True)
    }


def trained(model: nn.Module, steps: int = 30) -> tuple[float, float]:
    """The loss of the first step and the mean of the last ten."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 40, generator=generator)
        loss = (model(x) - x[:, :1].sin() - x[:, 1:2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], sum(losses[-10:]) / 10


@cache
def trained_plain() -> tuple[float, float]:
    return trained(model_of("tower"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["shortest", "e5m2 gradients", "transposed beside tensorwise"])
def test_a_model_trains_as_it_does_without_and_every_gemm_runs(name: str, make: Transposed) -> None:
    plan, package = make("tower", POLICIES[name][0])
    assert all(gemm.fp8 for site in plan.sites for gemm in site.gemms)
    assert Gemm.DGRAD not in {gemm for gemm, _ in recipes(plan, "first")}
    model = model_of("tower")
    plain = trained_plain()
    with package.apply(model) as patch:
        found = trained(model)
        patch.verify()
    assert found[0] == pytest.approx(plain[0], rel=0.05)
    assert found[1] == pytest.approx(plain[1], rel=0.1)
    assert plain[1] < 0.7 * plain[0]


def stands_for(x: Tensor, recipe: OperandRecipe) -> Tensor:
    """An operand, its rows those of its GEMM, as the numbers that its FP8 values stand for."""
    if recipe.transposed:
        rows = OperandRecipe(recipe.format, power_of_two=True)
        return dequantize(
            requantize_transpose(quantize(x.t(), format=rows.format, scaling=rows.scaling, power_of_two=True))
        )
    return dequantize(quantize(x, format=recipe.format, scaling=recipe.scaling, power_of_two=recipe.power_of_two))


@pytest.mark.parametrize("name", POLICIES)
def test_gradients_are_those_of_the_transposed_values(name: str, make: Transposed) -> None:
    defaults, count = POLICIES[name]
    plan, package = make("alone", defaults)
    found = recipes(plan, "linear")
    assert sum(recipe.transposed for recipe in found.values()) == count
    model = model_of("alone")
    generator = torch.Generator().manual_seed(2)
    sizes = torch.exp2(3 * torch.randn(96, 1, generator=generator))  # rows of very different scales
    x, dy = torch.randn(96, 48, generator=generator) * sizes, torch.randn(96, 24, generator=generator) * sizes.flip(0)
    with package.apply(model) as patch:
        y = model(x)
        y.backward(dy)
        patch.verify()
    weight = model.linear.weight.detach()
    operands = {
        (Gemm.FPROP, Operand.INPUT): x,
        (Gemm.FPROP, Operand.WEIGHT): weight,
        (Gemm.DGRAD, Operand.GRAD_OUTPUT): dy,
        (Gemm.DGRAD, Operand.WEIGHT): weight.t(),
        (Gemm.WGRAD, Operand.GRAD_OUTPUT): dy.t(),
        (Gemm.WGRAD, Operand.INPUT): x.t(),
    }
    values = {key: stands_for(operand, found[key]) for key, operand in operands.items()}
    products = {}
    for gemm in Gemm:
        first, second = (values[gemm, operand] for operand in OPERANDS[gemm])
        products[gemm] = first @ second.t()
    torch.testing.assert_close(y.detach(), products[Gemm.FPROP] + model.linear.bias.detach(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(model.linear.weight.grad, products[Gemm.WGRAD], rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(model.gain.grad, (products[Gemm.DGRAD] * x).sum(0), rtol=1e-5, atol=1e-2)
    assert 15 < sqnr(model.linear.weight.grad, dy.t() @ x) < 60


@pytest.mark.slow
def test_what_cannot_be_transposed_stays_and_the_rest_trains(make: Transposed) -> None:
    plan, package = make("tower", f"{SHORTEST}}}\nrules:\n  - {{match: body.4, fprop: {{compute: keep}}")
    assert recipes(plan, "body.4") == {}
    assert {gemm for gemm, _ in recipes(plan, "body.1")} == set(Gemm)
    model = model_of("tower")
    with package.apply(model) as patch:
        first, last = trained(model)
        patch.verify()
    assert last < 0.7 * first
