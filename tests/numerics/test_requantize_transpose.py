"""Turning against the rounding that its definition prescribes, value by value, and its corners."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from loka.errors import InputError
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import FORMATS, Quantized, dequantize, quantize, requantize_transpose

FLOOR = {Format.E4M3: 2.0**-108, Format.E5M2: 2.0**-115}  # the scale of an all-zero matrix


def all_values(format: Format) -> torch.Tensor:
    """The 256 values of a format, one column."""
    return torch.arange(256, dtype=torch.uint8).view(FORMATS[format].dtype).view(256, 1)


def nearest_even(exact: float, format: Format) -> float:
    """The value of the format next to `exact`, of two the one with an even code, by looking at all of them."""
    table = [(code, value) for code, value in enumerate(all_values(format).float().flatten().tolist()[:128])]
    finite = [(code, value) for code, value in table if math.isfinite(value)]
    _, value = min(finite, key=lambda item: (abs(item[1] - abs(exact)), item[0] % 2))
    return math.copysign(value, exact)


@pytest.mark.parametrize(("format", "down"), list(itertools.product(Format, (0, 1, 3, 7, 12, 18, 40))))
def test_every_value_is_scaled_and_rounded_to_nearest_even(format, down):
    values = all_values(format)
    scale = torch.full((257, 1), 2.0**-down)
    scale[256] = 1.0  # the largest
    transposed = requantize_transpose(Quantized(torch.cat([values, torch.zeros_like(values[:1])]), scale), check=True)
    assert transposed.values.shape == (1, 257)
    assert transposed.values.dtype == FORMATS[format].dtype
    assert transposed.scale.tolist() == [[1.0]]
    for value, result in zip(
        values.float().flatten().tolist(), transposed.values.float().flatten().tolist(), strict=False
    ):
        if math.isnan(value):
            assert math.isnan(result)
        elif math.isinf(value):
            assert result == value
        else:
            expected = nearest_even(value * 2.0**-down, format)
            assert (result, math.copysign(1.0, result)) == (expected, math.copysign(1.0, expected))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 24), (17, 1), (130, 479), (64, 13)])
def test_it_is_the_transpose_where_nothing_becomes_subnormal(rows, columns):
    generator = torch.Generator().manual_seed(rows)
    # Of 1 to 1.75 times 2**0 to 2**3, with a row's scale up to 8 times as large as another's.
    x = (1.0 + torch.randint(0, 4, (rows, columns), generator=generator) / 4) * 2.0 ** (torch.arange(rows) % 4)[:, None]
    quantized = quantize(x, format=Format.E4M3, scaling=Scaling.ROWWISE, power_of_two=True)
    transposed = requantize_transpose(quantized, check=True)
    assert transposed.values.is_contiguous()
    assert transposed.scale.is_contiguous()
    assert transposed.scale.shape == (columns, 1)
    assert set(transposed.scale.flatten().tolist()) == {quantized.scale.max().item()}
    torch.testing.assert_close(dequantize(transposed), x.t().contiguous(), rtol=0.0, atol=0.0)


def test_a_zero_row_and_far_apart_scales_vanish():
    x = torch.tensor([[0.0, -0.0], [1e30, -1e30], [1e-30, -1e-30], [float("nan"), 1.0]])
    quantized = quantize(x, format=Format.E4M3, scaling=Scaling.ROWWISE, power_of_two=True)
    transposed = requantize_transpose(quantized, check=True)
    assert dequantize(transposed)[:, 0].tolist() == [0.0, 0.0]
    assert torch.signbit(transposed.values.float())[:, 0].tolist() == [False, True]
    assert dequantize(transposed)[:, 1].tolist() == dequantize(quantized)[1].tolist()
    assert dequantize(transposed)[:, 2].tolist() == [0.0, 0.0]
    assert transposed.values.float()[:, 3].isnan().tolist() == [True, False]


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (5, 0), (0, 0)])
def test_empty_sizes(format, rows, columns):
    quantized = quantize(torch.zeros(rows, columns), format=format, scaling=Scaling.ROWWISE, power_of_two=True)
    transposed = requantize_transpose(quantized, check=True)
    assert transposed.values.shape == (columns, rows)
    assert transposed.scale.shape == (columns, 1)
    assert transposed.scale.flatten().tolist() == [FLOOR[format]] * columns


@pytest.mark.parametrize("shape", [(1, 1), (4,), (4, 2), (3, 1), (1, 4)])
def test_other_scales_are_refused(shape):
    with pytest.raises(InputError, match=r"rowwise scales, of shape \(4, 1\)"):
        requantize_transpose(Quantized(torch.zeros(4, 256).to(torch.float8_e4m3fn), torch.ones(shape)))


@pytest.mark.parametrize("x", [torch.zeros(4, 4), torch.zeros(4).to(torch.float8_e4m3fn)])
def test_what_is_no_fp8_matrix_is_refused(x):
    with pytest.raises(InputError, match="an FP8 matrix is needed"):
        requantize_transpose(Quantized(x, torch.ones(4, 1)))


@pytest.mark.parametrize("bad", [3.0, 0.0, -1.0, float("inf"), float("nan"), 2.0**-140, 1.0 + 2.0**-23])
def test_a_scale_that_is_no_power_of_two_is_refused_on_request(bad):
    quantized = Quantized(torch.ones(2, 3).to(torch.float8_e4m3fn), torch.tensor([[1.0], [bad]]))
    with pytest.raises(InputError, match="power_of_two=True"):
        requantize_transpose(quantized, check=True)
