"""Estimates of transposed operands: as the generated code makes them, with the scale of the whole operand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loka.numerics.enums import Format, Gemm, Scaling
from loka.numerics.metrics import mere, sqnr
from loka.numerics.quantize import dequantize, quantize, requantize_transpose
from loka.numerics.recipe import OperandRecipe
from loka.probe.estimate.candidate_recipes import candidates
from loka.probe.estimate.estimate import errors
from loka.probe.estimate.samplers import Drawn
from loka.probe.profile.header import from_text, to_text
from loka.probe.profile.profile import Estimate, Interval, Profile, SiteProfile

FPROP, DGRAD, WGRAD = (candidates(gemm)[-1] for gemm in Gemm)
ROWS = FPROP[0]


def matrix(rows: int, columns: int, seed: int, octaves: float = 2.0) -> Tensor:
    """Normal numbers in rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(octaves * torch.randn(rows, 1, generator=generator))
    return torch.randn(rows, columns, generator=generator) * sizes


def transposed(x: Tensor, format: Format = Format.E4M3) -> Tensor:
    """What the transposed copy of x stands for, spelt out as the generated code makes it."""
    return dequantize(requantize_transpose(quantize(x, format=format, scaling=Scaling.ROWWISE, power_of_two=True)))


@pytest.mark.parametrize("format", list(Format))
def test_a_weight_gradient_is_that_of_both_operands_transposed(format: Format) -> None:
    grad, x = matrix(300, 40, 0), matrix(300, 24, 1)
    pair = (OperandRecipe(format, Scaling.TENSORWISE, power_of_two=True, transposed=True), WGRAD[1])
    found = errors(Drawn(grad.t(), x.t(), None, None), pair)
    out, reference = transposed(grad, format) @ transposed(x).t(), grad.t() @ x
    assert found == (mere(out, reference).value, sqnr(out, reference))


def test_an_input_gradient_has_the_weight_transposed_and_the_output_gradient_as_it_is() -> None:
    grad, weight = matrix(70, 40, 2), matrix(40, 24, 3)
    found = errors(Drawn(grad, weight.t(), None, None), DGRAD)
    rows = dequantize(quantize(grad, format=Format.E4M3, scaling=Scaling.ROWWISE, power_of_two=True))
    reference = grad @ weight
    assert found == (
        mere(rows @ transposed(weight).t(), reference).value,
        sqnr(rows @ transposed(weight).t(), reference),
    )


def test_the_scale_is_that_of_the_largest_row_drawn_or_not() -> None:
    """A part of the features, with the whole operand's maximum, errs as the same features of the whole do."""
    grad, x = matrix(512, 64, 4, octaves=0.0), matrix(512, 16, 5, octaves=0.0)
    grad[3, 60] = 2.0**16  # in the part that is not drawn; what is drawn becomes subnormal beside it
    part = errors(Drawn(grad[:, :32].t(), x.t(), float(grad.abs().max()), None), WGRAD)
    out, reference = transposed(grad)[:32] @ transposed(x).t(), grad[:, :32].t() @ x
    assert part[1] == pytest.approx(sqnr(out, reference), abs=0.05)
    assert part[0] == pytest.approx(mere(out, reference).value, rel=0.02)
    unaware = errors(Drawn(grad[:, :32].t(), x.t(), None, None), WGRAD)
    assert part[1] < unaware[1] - 6


def test_a_row_far_above_the_others_costs_a_transposed_operand_what_rows_of_their_own_do_not_pay() -> None:
    grad, x = matrix(512, 32, 6, octaves=0.0), matrix(512, 32, 7, octaves=0.0)
    drawn = Drawn(grad.t().contiguous(), x.t().contiguous(), 2.0**16, None)
    rowwise = (ROWS, ROWS)
    assert errors(drawn, WGRAD)[1] < errors(drawn, rowwise)[1] - 6
    usual = Drawn(drawn.a, drawn.b, None, None)
    assert errors(usual, WGRAD)[1] == pytest.approx(errors(usual, rowwise)[1], abs=0.3)


def test_operands_that_are_not_finite_have_no_reference_and_zeros_are_exact() -> None:
    zeros, ones = torch.zeros(3, 8), torch.ones(2, 8)
    assert errors(Drawn(zeros, ones, None, None), WGRAD) == (0.0, float("inf"))
    broken = ones.clone()
    broken[0, 1] = torch.nan
    assert errors(Drawn(broken, ones, None, None), WGRAD) == (float("inf"), -float("inf"))


def test_a_profile_keeps_transposed_recipes_and_one_from_before_them_is_read() -> None:
    interval = Interval(0.1, 0.09, 0.11)
    estimates = tuple(Estimate(gemm, candidates(gemm)[-1], interval, interval, 16) for gemm in Gemm)
    site = SiteProfile("site", 24, 40, 64, (), estimates)
    profile = Profile("ranker", "pkg:build", "0.1.0", "2026-01-01T00:00:00Z", 10, 1, 10, 64, (site,), ())
    text = to_text(profile, None)
    assert from_text(text, "x.safetensors").profile == profile
    plain = replace(profile, sites=(replace(site, estimates=estimates[:1]),))
    header = json.loads(to_text(plain, None))
    for recipe in header["recipes"]:
        recipe.pop("turned", None)
    assert from_text(json.dumps(header), "x.safetensors").profile == plain
