"""Rounding into FP8, bit for bit against ml_dtypes, and the table of the formats."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from loka.numerics.enums import Format
from loka.numerics.quantize import FORMATS, decode

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


def inside(x: Tensor, format: Format) -> Tensor:
    """Those that the quantizers convert: finite ones up to the largest finite value, to which they clamp."""
    return x[x.abs() <= FORMATS[format].max]


@BOTH
@pytest.mark.parametrize("sample", [every_bfloat16, float32_sample])
def test_values_up_to_the_maximum_round_as_ml_dtypes_does(format: Format, sample) -> None:
    x = inside(sample().float(), format)
    assert x.numel() > 10_000
    assert_same_bits(x.to(FORMATS[format].dtype), x.numpy().astype(PEER[format]))


@BOTH
def test_zeros_keep_their_sign(format: Format) -> None:
    rounded = torch.tensor([0.0, -0.0, 1e-30, -1e-30]).to(FORMATS[format].dtype).float()
    assert rounded.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert rounded.signbit().tolist() == [False, True, False, True]


@BOTH
def test_the_table_of_formats_is_what_the_bits_say(format: Format) -> None:
    info = FORMATS[format]
    peer = ml_dtypes.finfo(PEER[format])
    assert info.max == float(peer.max) == torch.finfo(info.dtype).max
    assert info.smallest_normal == float(peer.smallest_normal)
    assert info.smallest_subnormal == float(peer.smallest_subnormal)
    half = info.smallest_subnormal / 2
    x = torch.tensor([info.smallest_subnormal, half, half * 1.01])
    assert x.to(info.dtype).float().tolist() == [info.smallest_subnormal, 0.0, info.smallest_subnormal]


@BOTH
@pytest.mark.parametrize("shape", [(256,), (16, 16), (2, 0)])
def test_every_pattern_decodes_as_ml_dtypes_does(format: Format, shape: tuple[int, ...]) -> None:
    values = torch.arange(math.prod(shape), dtype=torch.int16).to(torch.uint8).view(FORMATS[format].dtype).view(shape)
    for each in (values, values.t() if values.dim() == 2 else values[::3]):
        expected = torch.from_numpy(each.view(torch.uint8).numpy().view(PEER[format]).astype(np.float32))
        decoded = decode(each)
        assert decoded.dtype is torch.float32
        assert torch.equal(decoded.isnan(), expected.isnan())
        assert torch.equal(decoded.nan_to_num(0).view(torch.int32), expected.nan_to_num(0).view(torch.int32))
