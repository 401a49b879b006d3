"""Errors of backward GEMMs count as far as they are the same in each batch and turn the mean gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from loka.mods.policy_loader import load_policy
from loka.numerics.enums import Gemm
from loka.numerics.recipe import OperandRecipe
from loka.plan.examine import examine
from loka.probe.capture.live_sites import find_live
from loka.probe.sensitivity import LOST, UNSURE, GradientBias, HeldOut, change_by_misalignment, measure_ne
from tests.support.models.probe_models import Checkpointed


def square_loss(output: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.mse_loss(output[:, 0], target)


@pytest.fixture
def held_out(policy) -> HeldOut:
    """A model of four linears and 6 batches of targets that it is far from."""
    torch.manual_seed(1)
    model = Checkpointed()
    live = find_live(model, examine(load_policy(policy("plain"))).sites)
    inputs = [torch.randn(64, 12) for _ in range(6)]
    return HeldOut(live, [(x, x[:, 0] + 2 * x[:, 1]) for x in inputs], model, square_loss)


def test_no_error_and_a_common_factor_turn_nothing(held_out):
    bias = GradientBias(held_out)
    assert bias.misalignment({}) == pytest.approx(0.0, abs=1e-6)
    every = [live.site.name for live in held_out.live.sites]
    assert bias.misalignment({site: {Gemm.WGRAD: lambda a, b: (3 * a, b)} for site in every}) < 0.05  # not biases
    assert bias.misalignment({"out": {Gemm.DGRAD: lambda a, b: (a / 2, b)}}) < 0.2


def test_lost_gradients_count_more_the_more_of_the_model_they_reach(held_out):
    bias = GradientBias(held_out)

    def lost(site: str) -> float:
        return bias.misalignment({site: {Gemm.DGRAD: lambda a, b: (0 * a, b)}})

    assert 0.02 < lost("hidden.0") < lost("hidden.2") < lost("out") <= 1.0


def test_noise_of_another_sign_in_each_batch_counts_much_less_than_the_same_error(held_out):
    generator = torch.Generator().manual_seed(3)
    bias = GradientBias(held_out)
    same = torch.randn(16, 64, generator=generator)

    def noisy(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a + a.std() * torch.randn(a.shape, generator=generator), b

    def biased(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a + 0.3 * a.std() * same.sign(), b.abs()

    noise, error = (bias.misalignment({"hidden.2": {Gemm.WGRAD: each}}) for each in (noisy, biased))
    assert noise < 0.2 * error


def test_a_gradient_that_is_not_finite_is_an_infinite_change(held_out):
    found = GradientBias(held_out).misalignment({"out": {Gemm.DGRAD: lambda a, b: (a * math.inf, b)}})
    assert found == math.inf
    assert change_by_misalignment(found, 20.0).high == math.inf


def test_the_change_is_a_share_of_what_training_gained():
    change = change_by_misalignment(0.01, 20.0)
    assert (change.mean, change.low) == (pytest.approx(LOST * 0.2), 0.0)
    assert change.high == pytest.approx(UNSURE * change.mean)
    assert change_by_misalignment(1.0, 20.0).mean == 20.0
    assert change_by_misalignment(0.5, -3.0).high == 0.0  # nothing learned, nothing to lose


def test_backward_gemms_are_measured_with_the_forward(held_out):
    recipe, coarse = OperandRecipe(power_of_two=True), OperandRecipe(amax=1e9, range="static")
    recipes = {"hidden.2": {Gemm.DGRAD: [(recipe, recipe), (coarse, coarse)], Gemm.WGRAD: [(recipe, recipe)]}}
    now = held_out.mean_loss()
    fine, lost, wgrad = measure_ne(held_out, recipes, 1.2 * now)["hidden.2"]
    assert (fine.gemm, lost.gemm, wgrad.gemm) == (Gemm.DGRAD, Gemm.DGRAD, Gemm.WGRAD)
    assert fine.ne_percent.high < 0.05 < 0.3 < lost.ne_percent.mean < 20
    assert (fine.run_percent, fine.varying_error) == (0.0, None)
