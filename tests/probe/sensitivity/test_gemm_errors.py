"""The error of rounding one GEMM is added to the product of its site, forward and backward, and to nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from loka.mods.policy_loader import load_policy
from loka.numerics.enums import Format, Gemm, Range, Scaling
from loka.numerics.quantize import dequantize, fake_quantize, quantize, requantize_transpose
from loka.numerics.recipe import OperandRecipe, transposed_copy
from loka.plan.examine import examine
from loka.probe.capture.live_sites import LiveModel, find_live
from loka.probe.gemm_errors import GemmErrors, recipe_rounding
from tests.support.models.probe_models import build_forms, build_shared, forms_inputs, shared_inputs

FORMS = ("first.weight", "twice.weight", "right", "left", "summed", "transposed", "added", "out.weight")


def weight_doubled(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounding of fprop and dgrad by which y = x @ (2 weight).T."""
    return a, 2 * b


def gradient_doubled(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounding of wgrad that belongs to it: the Parameter's gradient is twice that of the product's weight."""
    return 2 * a, b


DOUBLED = {Gemm.FPROP: weight_doubled, Gemm.DGRAD: weight_doubled, Gemm.WGRAD: gradient_doubled}


@pytest.fixture
def live_of(policy):
    """A model's sites, as the policy finds them."""

    def make(name: str, model: nn.Module) -> LiveModel:
        return find_live(model, examine(load_policy(policy(name))).sites)

    return make


def run(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    out.square().mean().backward()
    return [out.detach(), x.grad, *(each.grad for each in model.parameters() if each.grad is not None)]


def test_every_form_of_a_product_is_as_with_the_rounded_operands(live_of):
    torch.manual_seed(0)
    model, x = build_forms(), forms_inputs(6)
    live = live_of("forms", model)
    names = {site.site.weight: site.site.name for site in live.sites}
    for weight in FORMS:
        parameter = model.get_parameter(weight)
        before = run(model, x)
        with GemmErrors(live, {names[weight]: DOUBLED}):
            found = run(model, x)
        with torch.no_grad():
            parameter.mul_(2)
        expected = run(model, x)
        parameter.grad.mul_(2)  # expected holds this tensor: of the Parameter, of which the weight is twice
        with torch.no_grad():
            parameter.div_(2)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, msg=weight)
        assert not torch.equal(found[0], before[0])
        for one, other in zip(run(model, x), before, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("gemm", list(Gemm))
def test_a_gemm_is_rounded_alone(gemm, live_of):
    torch.manual_seed(0)
    model, x = build_forms(), forms_inputs(6)
    live = live_of("forms", model)
    before = run(model, x)
    with GemmErrors(live, {"out": {gemm: DOUBLED[gemm]}}):
        found = run(model, x)
    same_output = torch.equal(found[0], before[0])
    same_weight = torch.equal(found[-2], before[-2])  # out.weight
    same_input = torch.equal(found[1], before[1])
    if gemm is Gemm.FPROP:
        assert not same_output
    elif gemm is Gemm.DGRAD:
        assert (same_output, same_weight, same_input) == (True, True, False)
    else:
        assert (same_output, same_weight, same_input) == (True, False, True)


def test_sites_that_share_a_parameter_are_told_apart(live_of):
    torch.manual_seed(0)
    model, x = build_shared(), shared_inputs(6)
    live = live_of("shared", model)
    one = next(site.site.name for site in live.sites if site.site.owner == "one")
    with GemmErrors(live, {one: {Gemm.FPROP: weight_doubled}}), torch.no_grad():
        found = model(x)
    expected = torch.tanh(2 * x @ model.one.weight) @ model.one.weight
    torch.testing.assert_close(found, expected)


def test_what_is_observed_is_the_product_without_its_bias_and_the_error(live_of):
    torch.manual_seed(0)
    model, x = build_forms(), forms_inputs(6)
    seen = []
    with GemmErrors(live_of("forms", model), {"first": DOUBLED}, lambda *each: seen.append(each)):
        model(x)
    ((site, output, error),) = seen
    assert site == "first"
    torch.testing.assert_close(output, x.reshape(-1, 12) @ model.first.weight.t())
    torch.testing.assert_close(error, output)
    assert not error.requires_grad


def test_a_recipe_rounds_both_operands_as_the_reference_does():
    torch.manual_seed(0)
    a, b = torch.randn(7, 40), torch.randn(9, 40)
    rows = OperandRecipe(power_of_two=True)
    static = OperandRecipe(range=Range.STATIC, amax=0.5)
    found = recipe_rounding((rows, transposed_copy(Format.E4M3, Scaling.ROWWISE)))(a, b)
    assert torch.equal(
        found[0], dequantize(quantize(a, format=Format.E4M3, scaling=Scaling.ROWWISE, power_of_two=True))
    )
    source = quantize(b.t(), format=Format.E4M3, scaling=Scaling.ROWWISE, power_of_two=True)
    assert torch.equal(found[1], dequantize(requantize_transpose(source)))
    assert fake_quantize(a, static).abs().max() == 0.5
