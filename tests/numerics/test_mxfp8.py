"""blockwise_1x32 against the definition of MXFP8 (OCP Microscaling Formats 1.0), written out in numpy on float64.

The scale is 2^e with the least e for which no value exceeds e4m3's maximum (torchao calls it RCEIL; on 10^6 values of
all exponents `torchao.prototype.mx_formats.to_mx` gave the same bits). Blocks below 2^-100 have our floor.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import AMAX_FLOOR, Quantized, dequantize, quantize
from loka.numerics.recipe import OperandRecipe

ROWS, COLUMNS = 1000, 1024


def quantized(x: Tensor) -> Quantized:
    recipe = OperandRecipe(scaling=Scaling.BLOCKWISE_1X32)
    return quantize(x, format=Format.E4M3, scaling=recipe.scaling, power_of_two=recipe.power_of_two)


def by_definition(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """FP8 values (R, C) as bytes and scales (R, C / 32) of finite float32 rows."""
    blocks = x.double().numpy().reshape(ROWS, COLUMNS // 32, 32)
    mantissa, exponent = np.frexp(np.abs(blocks).max(2) / 448.0)  # of mantissas from 1/2 on: 1/2 is a power of two
    exponent = exponent - (mantissa == 0.5)
    values = np.ldexp(blocks, -exponent[:, :, None]).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return values.view(np.uint8).reshape(ROWS, COLUMNS), np.ldexp(1.0, exponent)


def samples() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (ROWS, COLUMNS), generator=generator).to(torch.int32).view(torch.float32)
    shape = (ROWS, COLUMNS // 32, 1)
    wide = torch.randn((ROWS, COLUMNS // 32, 32), generator=generator)
    wide = wide * torch.exp2(torch.randint(-90, 110, shape, generator=generator).float())
    subnormal = wide * torch.exp2(torch.randint(-12, 1, wide.shape, generator=generator).float())  # in e4m3
    return {
        "any bits": torch.where(bits.isfinite(), bits, 0.0),
        "any scale": wide.view(ROWS, COLUMNS),
        "subnormal": subnormal.view(ROWS, COLUMNS),
        "powers of two": torch.exp2(wide.log2().nan_to_num(0.0).round()).view(ROWS, COLUMNS),
    }


@pytest.mark.parametrize("name", list(samples()))
def test_values_and_scales_are_those_of_the_definition(name: str) -> None:
    x = samples()[name]
    found, (values, scale) = quantized(x), by_definition(x)
    assert (x.abs().view(ROWS, -1, 32).amax(2) >= AMAX_FLOOR).all()
    assert np.array_equal(found.scale.numpy(), scale)
    assert np.array_equal(found.values.view(torch.uint8).numpy(), values)
    assert torch.equal(found.scale.to(torch.float8_e8m0fnu).float(), found.scale)  # that type holds every scale


def test_what_is_not_finite_stays_in_its_place() -> None:
    x = torch.ones(2, 70)
    x[0, 3], x[1, 40], x[1, 69] = torch.nan, torch.inf, 448.0
    back = dequantize(quantized(x))
    assert torch.equal(back.isnan(), ~x.isfinite())
    assert torch.equal(back[x.isfinite()], x[x.isfinite()])
    assert quantized(x).scale.shape == (2, 3)


def test_a_block_of_zeros_is_zero() -> None:
    found = quantized(torch.zeros(1, 32))
    assert found.scale.item() == 2.0**-108  # the floor over 448, rounded up
    assert torch.equal(dequantize(found), torch.zeros(1, 32))
