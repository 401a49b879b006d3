"""Rounding into FP8, bit for bit against ml_dtypes, and what happens beyond the largest finite value."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from loka.numerics.enums import Format
from loka.numerics.formats import FORMATS, to_fp8

PEER = {Format.E4M3: ml_dtypes.float8_e4m3fn, Format.E5M2: ml_dtypes.float8_e5m2}
BOTH = pytest.mark.parametrize("format", list(Format))


def every_bfloat16() -> Tensor:
    """All 2^16 bit patterns: zeros, subnormals, infinities and NaNs of both signs among them."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def float32_sample() -> Tensor:
    """Random bit patterns, and every FP8 value and tie between two with the float32 values next to them."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (400_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    samples = [patterns.view(torch.float32), torch.randn(200_000, generator=generator) * 300.0]
    for format in Format:
        values = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(FORMATS[format].dtype).float()
        finite = values[values.isfinite()].unique()
        ties = (finite[1:] + finite[:-1]) / 2
        top = torch.tensor(
            [FORMATS[format].max * factor for factor in (1.0, 1.03, 1.0357, 1.0358, 1.07, 1.125, 1.2, 2.0)]
        )
        exact = torch.cat([finite, ties, top, -top, torch.tensor([0.0, -0.0])])
        up = torch.nextafter(exact, torch.tensor(math.inf))
        down = torch.nextafter(exact, torch.tensor(-math.inf))
        samples += [exact, up, down]
    return torch.cat(samples)


def assert_same_bits(actual: Tensor, expected: np.ndarray) -> None:
    actual_bits = actual.view(torch.uint8).numpy()
    expected_bits = expected.view(np.uint8)
    actual_nan = actual.float().isnan().numpy()
    expected_nan = np.isnan(expected.astype(np.float32))
    assert np.array_equal(actual_nan, expected_nan)
    assert np.array_equal(actual_bits[~actual_nan], expected_bits[~expected_nan])


@BOTH
def test_every_bfloat16_value_rounds_as_ml_dtypes_does(format: Format) -> None:
    x = every_bfloat16()
    assert x.numel() == 2**16
    with np.errstate(all="ignore"):
        expected = x.float().numpy().astype(PEER[format])
    assert_same_bits(to_fp8(x, format, saturate=False), expected)


@BOTH
def test_float32_values_round_as_ml_dtypes_does(format: Format) -> None:
    x = float32_sample()
    with np.errstate(all="ignore"):
        expected = x.numpy().astype(PEER[format])
    assert_same_bits(to_fp8(x, format, saturate=False), expected)


@BOTH
@pytest.mark.parametrize("sample", [every_bfloat16, float32_sample])
def test_saturation_differs_from_plain_rounding_only_beyond_the_maximum(format: Format, sample) -> None:
    x = sample().float()
    limit = FORMATS[format].max
    plain, saturated = (to_fp8(x, format, saturate=saturate).float() for saturate in (False, True))
    finite = x.isfinite()
    assert torch.equal(saturated[~finite].isnan(), torch.ones_like(saturated[~finite], dtype=torch.bool))
    inside = finite & (x.abs() <= limit)
    assert torch.equal(saturated[inside], plain[inside])
    assert torch.equal(saturated[inside].signbit(), plain[inside].signbit())
    beyond = finite & (x.abs() > limit)
    assert beyond.any()
    assert torch.equal(saturated[beyond], limit * x[beyond].sign())


def test_overflow_of_e4m3_without_saturation_is_nan_from_the_tie_above_the_maximum() -> None:
    x = torch.tensor([448.0, 464.0, 464.00003, 480.0, 1e30, math.inf, -math.inf, math.nan])
    rounded = to_fp8(x, Format.E4M3, saturate=False).float()
    assert rounded[:2].tolist() == [448.0, 448.0]  # 464 is the tie between 448 and the 480 that is not there: to even
    assert rounded[2:].isnan().all()


def test_overflow_of_e5m2_without_saturation_is_infinity() -> None:
    x = torch.tensor([57344.0, 61439.0, 61440.0, 1e30, -math.inf, math.nan])
    rounded = to_fp8(x, Format.E5M2, saturate=False).float()
    assert rounded[:5].tolist() == [57344.0, 57344.0, math.inf, math.inf, -math.inf]
    assert rounded[5].isnan()


@BOTH
def test_saturation_clamps_finite_overflow_and_leaves_the_rest_not_finite(format: Format) -> None:
    x = torch.tensor([1e30, -1e30, torch.finfo(torch.float32).max, math.inf, -math.inf, math.nan])
    limit = FORMATS[format].max
    rounded = to_fp8(x, format, saturate=True).float()
    assert rounded[:3].tolist() == [limit, -limit, limit]
    assert rounded[3:].isnan().all()


@BOTH
@pytest.mark.parametrize("saturate", [False, True])
def test_zeros_keep_their_sign(format: Format, saturate: bool) -> None:
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-30])
    rounded = to_fp8(x, format, saturate=saturate).float()
    assert rounded.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert rounded.signbit().tolist() == [False, True, False, True]


@BOTH
def test_the_table_of_formats_is_what_the_bits_say(format: Format) -> None:
    info = FORMATS[format]
    peer = ml_dtypes.finfo(PEER[format])
    assert info.max == float(peer.max) == torch.finfo(info.dtype).max
    assert info.smallest_normal == float(peer.smallest_normal)
    assert info.smallest_subnormal == float(peer.smallest_subnormal)
    assert info.mantissa_bits == peer.nmant
    assert info.has_infinity == bool(torch.tensor([math.inf]).to(info.dtype).float().isinf().item())
    half = info.smallest_subnormal / 2
    x = torch.tensor([info.smallest_subnormal, half, half * 1.01])
    assert to_fp8(x, format, saturate=False).float().tolist() == [info.smallest_subnormal, 0.0, info.smallest_subnormal]
