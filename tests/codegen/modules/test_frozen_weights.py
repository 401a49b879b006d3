"""Packages of models of which a part needs no gradient: `verify` asks for what a step needs, gradients are right."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from loka import dispatch
from loka.kernels import call_counters
from loka.numerics.enums import Gemm
from tests.support.codegen.policy_packages import Make
from tests.support.models import frozen_models as models

HOME = "tests.support.models.frozen_models"
CHAIN = "{compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}"
RECIPES = (CHAIN, "{compute: fp8, scaling: tensorwise}")
FPROP, TO_WEIGHT, TO_INPUT = ("fprop",), ("fprop", "wgrad"), ("fprop", "dgrad")
EVERY = ("fprop", "dgrad", "wgrad")
EXPECTED = {
    "adapted": {
        "0.base": FPROP, "0.down": TO_WEIGHT, "0.up": EVERY, "3.base": TO_INPUT, "3.down": EVERY, "3.up": EVERY,
        "6.base": TO_INPUT, "6.down": EVERY, "6.up": EVERY,
    },
    "frozen_tower": {"0": FPROP, "3": FPROP, "6": TO_WEIGHT},
    "level": {"first": TO_WEIGHT, "last.expert": EVERY, "last.head": EVERY, "last.gate": FPROP},
}  # fmt: skip


def policy(factory: str, defaults: str) -> str:
    return (
        f'version: 1\nname: frozen\nmodel: {{factory: "{HOME}:{factory}", inputs: "{HOME}:inputs", batch_size: 64}}\n'
        f"target: reference\ndefaults: {defaults}\n"
    )


def step(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Gradients of a training step, by name."""
    model.zero_grad()
    model(x).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def said(verify: Any) -> list[str]:
    """What verify warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        verify()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("defaults", RECIPES)
@pytest.mark.parametrize("factory", list(EXPECTED))
def test_a_step_runs_what_is_planned_and_nothing_else_is(package: Make, factory: str, defaults: str) -> None:
    plan, _, fp8 = package(f"gen_frozen_{factory}", policy(factory, defaults))
    assert {site.site.name: tuple(gemm.gemm.value for gemm in site.gemms) for site in plan.sites} == EXPECTED[factory]
    needed = zip(plan.sites, EXPECTED[factory].values(), strict=True)
    flops = sum(len(gemms) * site.site.share for site, gemms in needed)
    in_fp8 = sum(site.site.share for site in plan.sites for gemm in site.gemms if gemm.fp8)
    assert plan.share_fp8 == pytest.approx(in_fp8 / flops)
    torch.manual_seed(0)
    model, x = getattr(models, factory)(), models.inputs(64)[0]
    exact = step(model, x)
    with fp8.apply(model) as patch:
        found = step(model, x)
        assert said(patch.verify) == []
        ran = {label for number, label in patch._labels() if call_counters.counts(number)}
    assert ran == {(name, gemm) for name, gemms in EXPECTED[factory].items() for gemm in gemms}
    for name, gradient in exact.items():
        assert (gradient is None) == (found[name] is None), name
        if gradient is not None:
            assert (found[name] - gradient).norm() <= 0.2 * gradient.norm(), name


@pytest.mark.parametrize(("defaults", "missing"), [(RECIPES[0], 2), (RECIPES[1], 4)])  # a chain's dgrads run on
def test_weights_that_are_frozen_since_planning_are_one_line(package: Make, defaults: str, missing: int) -> None:
    _, _, fp8 = package("gen_frozen_later", policy("tower", defaults))
    model, x = models.tower(), models.inputs(64)[0]
    patch = fp8.apply(model)
    model[:6].requires_grad_(False)
    step(model, x)
    (line,) = said(patch.verify)
    assert line == (
        "gen_frozen_later: the weights of 2 sites are frozen since planning ('0', '3'), so that "
        f"{missing} planned GEMMs of the backward were not needed: run loka generate again"
    )
    patch.reset()
    with torch.no_grad():
        model(x)
    with pytest.raises(dispatch.VerifyError) as error:  # the head was to be trained
        patch.verify()
    first, second = error.value.problems
    assert first.startswith("the weights of 2 sites are frozen since planning ('0', '3')")
    assert second.startswith("6: dgrad, wgrad did not run: no backward reached it")
    assert said(lambda: patch.verify(backward=False)) == []


@pytest.mark.parametrize("defaults", RECIPES)
def test_weights_that_are_trained_since_planning_have_right_gradients_and_are_one_line(
    package: Make, defaults: str
) -> None:
    plan, _, fp8 = package("gen_thawed", policy("frozen_tower", defaults))
    assert all(Gemm.WGRAD not in [gemm.gemm for gemm in site.gemms] for site in plan.sites[:2])
    torch.manual_seed(0)
    model, x = models.frozen_tower().requires_grad_(True), models.inputs(64)[0]
    exact = step(model, x)
    patch = fp8.apply(model)
    found = step(model, x)
    for name, gradient in exact.items():
        assert (found[name] - gradient).norm() <= 0.2 * gradient.norm(), name
    assert said(patch.verify) == [
        "gen_thawed: the weights of 2 sites are trained, and frozen when planned ('0', '3'), so that their wgrads are "
        "not in the plan: run loka generate again"
    ]


def test_a_frozen_model_that_serves_says_nothing(package: Make) -> None:
    _, _, fp8 = package("gen_frozen_served", policy("tower", CHAIN))
    model = models.tower().requires_grad_(False).eval()
    patch = fp8.apply(model, mode="infer")
    model(models.inputs(64)[0])
    assert said(patch.verify) == []
