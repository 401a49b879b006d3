"""Estimates of transposed operands: as the generated code makes them, with the scale of the whole operand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loka.numerics.enums import Format, Gemm, Scaling
from loka.numerics.metrics import mere, sqnr
from loka.numerics.quantize import dequantize, quantize, requantize_transpose
from loka.numerics.recipe import OperandRecipe
from loka.probe.estimate import candidates, errors
from loka.probe.samplers import Drawn

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
