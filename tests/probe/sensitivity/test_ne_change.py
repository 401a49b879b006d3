"""The change of NE by a site's error: none for what is the same for all samples, the analytic one for what varies."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.mods.policy_loader import load_policy
from loka.numerics.enums import Format, Gemm
from loka.numerics.quantize import fake_quantize
from loka.numerics.recipe import OperandRecipe
from loka.plan.examine import examine
from loka.probe.capture.live_sites import find_live
from loka.probe.sensitivity import (
    ForwardSensitivity,
    HeldOut,
    LossChange,
    evaluating,
    loss_change,
    measure_ne,
    ne_change,
)
from tests.support.models.probe_models import Checkpointed


def click_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output.reshape(target.shape).double(), target.double())


@pytest.fixture
def held_out(policy) -> HeldOut:
    """A model of three linears, and 8 batches of 512 samples whose labels follow its own probabilities."""
    torch.manual_seed(1)
    model = Checkpointed()
    live = find_live(model, examine(load_policy(policy("plain"))).sites)
    inputs = [torch.randn(512, 12) for _ in range(8)]
    with torch.no_grad():
        batches = [(x, torch.bernoulli(torch.sigmoid(model(x)[:, 0]))) for x in inputs]
    return HeldOut(live, batches, model, click_loss)


def expected_even(held_out: HeldOut, shifts: list[Tensor]) -> float:
    """The second-order change in per cent: the mean of p (1 - p) dz^2 / 2, relative to the loss, by batch."""
    found = []
    for (x, target), shift in zip(held_out.batches, shifts, strict=True):
        z = held_out.run(x).detach()[:, 0]
        p, varying = torch.sigmoid(z), shift - shift.mean()
        found.append(100 * float((p * (1 - p) * varying**2 / 2).mean()) / float(click_loss(z, target)))
    return math.fsum(found) / len(found)


def test_an_error_that_all_samples_share_costs_nothing(held_out):
    """A bias learns it: the input of the last linear gets the same error in each row."""
    measured = ForwardSensitivity(held_out)
    with torch.no_grad(), evaluating(held_out.live.root):
        changes, varying = measured.changes(lambda a, b: (a + 0.3, b), "out")
    change, _ = ne_change(changes)
    assert abs(change.mean) < 1e-6
    assert varying.relative < 1e-9
    assert change.high == pytest.approx(sum(each.even for each in changes) / 8, rel=1e-3)  # another rounding costs it
    assert change.high > 0.01


def test_an_error_that_varies_costs_what_the_curvature_says(held_out):
    torch.manual_seed(2)
    noise = [0.05 * torch.randn(512, 16) for _ in held_out.batches]
    drawn = iter(noise)
    measured = ForwardSensitivity(held_out)
    with torch.no_grad(), evaluating(held_out.live.root):
        changes, varying = measured.changes(lambda a, b: (a + next(drawn), b), "out")
        shifts = [each @ held_out.live.root.out.weight[0] for each in noise]
        expected = expected_even(held_out, shifts)
    change, _ = ne_change(changes)
    assert change.mean == pytest.approx(expected, rel=0.02)
    assert change.low < expected < change.high < 1.5 * expected
    assert 0.001 < varying.relative < 1.0


def test_recipes_are_in_order_and_a_coarser_one_costs_more(held_out):
    fine, coarse = OperandRecipe(power_of_two=True), OperandRecipe(format=Format.E5M2)
    before = held_out.run(held_out.batches[0][0]).detach()
    done = []
    recipes = {"hidden.0": {Gemm.FPROP: [(fine, fine), (coarse, coarse)]}, "out": {Gemm.FPROP: [(fine, fine)]}}
    found = measure_ne(held_out, recipes, 1.0, lambda *n: done.append(n))
    assert [[each.operands[0] for each in found[site]] for site in ("hidden.0", "out")] == [[fine, coarse], [fine]]
    assert {each.gemm for each in found["hidden.0"]} == {Gemm.FPROP}
    first, second = found["hidden.0"]
    assert 0 < first.ne_percent.mean < second.ne_percent.mean
    assert 2 * first.varying_error < second.varying_error
    assert done == [(1, 2), (2, 2)]
    assert held_out.live.root.training
    assert torch.equal(held_out.run(held_out.batches[0][0]), before)


def test_the_varying_error_is_that_of_the_product(held_out):
    recipe = OperandRecipe()
    (found,) = measure_ne(held_out, {"first": {Gemm.FPROP: [(recipe, recipe)]}}, 1.0)["first"]
    weight, error, output = held_out.live.root.first.weight.detach(), 0.0, 0.0
    for x, _ in held_out.batches:
        y = x @ weight.t()
        wrong = fake_quantize(x, recipe) @ fake_quantize(weight, recipe).t() - y
        error += float((wrong - wrong.mean(0)).square().sum())
        output += float((y - y.mean(0)).square().sum())
    assert found.varying_error == pytest.approx(error / output, rel=1e-3)


def test_a_loss_that_is_not_finite_is_an_infinite_change():
    change, odd = ne_change([LossChange(0.1, 0.1, 0.2), LossChange(math.nan, math.nan, math.nan)])
    assert (change.mean, change.low, change.high, odd) == (math.inf, math.inf, math.inf, 0.0)


def test_the_parts_of_a_change_have_their_closed_form():
    output, error = torch.zeros(4, 1), torch.tensor([[1.0], [-1.0], [3.0], [-3.0]])
    target = torch.tensor([[1.0], [0.0], [2.0], [0.0]])
    found = loss_change(nn.functional.mse_loss, output, output + error + 5.0, target)
    before = 5 / 4
    assert found.varying == pytest.approx(100 * 5 / before)  # the mean of dz^2 without that of dz, 5
    assert found.even == pytest.approx(100 * (5 + 25) / before)
    assert found.odd == pytest.approx(100 * -2 * (1 + 6 + 5 * 3) / 4 / before)  # the mean of 2 (z - y) dz
