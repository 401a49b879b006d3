"""The reference quantizers: shapes, scales, extremes, and that torch.compile keeps their bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loka.errors import InputError
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import (
    AMAX_FLOOR,
    FORMATS,
    Quantized,
    dequantize,
    expand_scale,
    quantize,
    round_up_to_power_of_two,
    scale_shape,
    static_scale,
)
from loka.numerics.scalings import PROBED

SHAPES = [(1, 1), (3, 13), (17, 479), (128, 128), (129, 257), (300, 24)]
EMPTY = [(0, 0), (0, 64), (5, 0), (0, 200), (200, 0)]
ALL_SCALINGS = pytest.mark.parametrize("scaling", sorted(set(Scaling) - PROBED))  # of 8 bits
BOTH_FORMATS = pytest.mark.parametrize("format", list(Format))


def normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def blocks(rows: int, columns: int, scaling: Scaling) -> list[tuple[tuple[int, int], slice, slice]]:
    """(index of the scale, rows, columns) of every block, spelled out."""
    height = {Scaling.TENSORWISE: rows, Scaling.BLOCKWISE_128X128: 128}.get(scaling, 1)
    width = {Scaling.TENSORWISE: columns, Scaling.ROWWISE: columns, Scaling.BLOCKWISE_1X32: 32}.get(scaling, 128)
    return [
        ((i, j), slice(top, top + height), slice(left, left + width))
        for i, top in enumerate(range(0, rows, height))
        for j, left in enumerate(range(0, columns, width))
    ]


@ALL_SCALINGS
@BOTH_FORMATS
@pytest.mark.parametrize("shape", SHAPES)
def test_each_block_has_the_scale_that_brings_its_largest_value_to_the_maximum(
    shape: tuple[int, int], format: Format, scaling: Scaling
) -> None:
    x = normal(*shape)
    quantized = quantize(x, format=format, scaling=scaling)
    assert quantized.values.shape == shape
    assert quantized.values.is_contiguous()
    assert quantized.values.dtype is FORMATS[format].dtype
    assert quantized.scale.dtype is torch.float32
    expected = torch.empty(scale_shape(*shape, scaling))
    for index, rows, columns in blocks(*shape, scaling):
        expected[index] = x[rows, columns].abs().max() / FORMATS[format].max
    assert torch.equal(quantized.scale, expected)


@ALL_SCALINGS
@BOTH_FORMATS
@pytest.mark.parametrize("shape", SHAPES)
def test_a_value_is_its_fp8_times_its_scale_within_half_a_step(
    shape: tuple[int, int], format: Format, scaling: Scaling
) -> None:
    x = normal(*shape) * torch.logspace(-3, 3, shape[0]).unsqueeze(1)
    quantized = quantize(x, format=format, scaling=scaling)
    info = FORMATS[format]
    spread = expand_scale(quantized.scale, *shape)
    step = torch.maximum(x.abs() * torch.finfo(info.dtype).eps, spread * info.smallest_subnormal)
    assert ((dequantize(quantized) - x).abs() <= 0.5001 * step).all()


@ALL_SCALINGS
@BOTH_FORMATS
@pytest.mark.parametrize("shape", EMPTY)
def test_empty_matrices_give_empty_values_and_positive_scales(
    shape: tuple[int, int], format: Format, scaling: Scaling
) -> None:
    quantized = quantize(torch.empty(shape), format=format, scaling=scaling)
    assert quantized.values.shape == shape
    assert quantized.scale.shape == scale_shape(*shape, scaling)
    assert (quantized.scale > 0).all()
    assert dequantize(quantized).shape == shape


@ALL_SCALINGS
@BOTH_FORMATS
def test_zeros_have_a_positive_scale_and_stay_zero(format: Format, scaling: Scaling) -> None:
    x = torch.zeros(130, 140)
    x[129, :] = 1.0
    for power_of_two in (False, True):
        quantized = quantize(x, format=format, scaling=scaling, power_of_two=power_of_two)
        assert (quantized.scale > 0).all()
        assert quantized.scale.isfinite().all()
        assert (1 / quantized.scale).isfinite().all()
        assert (dequantize(quantized)[:129] == 0).all()
        assert dequantize(quantized)[129].sub(1).abs().max() < 0.1


def test_the_scale_of_a_zero_matrix_is_the_floor_over_the_maximum() -> None:
    quantized = quantize(torch.zeros(2, 2), format=Format.E4M3, scaling=Scaling.TENSORWISE)
    assert quantized.scale.item() == torch.tensor(AMAX_FLOOR / 448.0).item()


@ALL_SCALINGS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_poisons_itself_and_no_scale(scaling: Scaling, bad: float) -> None:
    x = normal(130, 140)
    x[0, 0] = 0.0
    clean = quantize(x, format=Format.E4M3, scaling=scaling)
    x[0, 0] = bad
    poisoned = quantize(x, format=Format.E4M3, scaling=scaling)
    assert torch.equal(poisoned.scale, clean.scale)
    assert poisoned.values[0, 0].float().isnan()
    expected, actual = clean.values.view(torch.uint8).clone(), poisoned.values.view(torch.uint8).clone()
    expected[0, 0] = actual[0, 0] = 0
    assert torch.equal(actual, expected)


@ALL_SCALINGS
def test_a_matrix_without_a_finite_value_has_a_positive_scale(scaling: Scaling) -> None:
    quantized = quantize(torch.full((3, 5), math.nan), format=Format.E5M2, scaling=scaling)
    assert (quantized.scale > 0).all()
    assert quantized.values.float().isnan().all()


@ALL_SCALINGS
@BOTH_FORMATS
@pytest.mark.parametrize("extreme", [torch.finfo(torch.float32).max, 1e38, 1e-45, 2.0**-126, 2.0**-100])
def test_extreme_magnitudes_neither_overflow_nor_divide_by_zero(
    extreme: float, format: Format, scaling: Scaling
) -> None:
    for power_of_two in (False, True):
        x = torch.full((2, 3), extreme)
        quantized = quantize(x, format=format, scaling=scaling, power_of_two=power_of_two)
        assert (quantized.scale > 0).all()
        assert quantized.scale.isfinite().all()
        assert quantized.values.float().isfinite().all()
        if AMAX_FLOOR <= extreme < torch.finfo(torch.float32).max:  # rounding the latter up leaves float32
            assert ((dequantize(quantized).double() / x.double() - 1).abs() < 0.1).all()


@given(st.floats(min_value=2.0**-110, max_value=2.0**120, width=32))
@settings(max_examples=300, deadline=None)
def test_rounding_up_to_a_power_of_two_is_exact(value: float) -> None:
    rounded = round_up_to_power_of_two(torch.tensor([value])).item()
    mantissa, _ = math.frexp(rounded)
    assert mantissa == 0.5
    assert value <= rounded < 2 * value


def test_every_power_of_two_stays_and_its_neighbours_move() -> None:
    powers = torch.ldexp(torch.ones(230), torch.arange(-110, 120))
    assert torch.equal(round_up_to_power_of_two(powers), powers)
    assert torch.equal(round_up_to_power_of_two(torch.nextafter(powers, torch.tensor(math.inf))), 2 * powers)
    assert torch.equal(round_up_to_power_of_two(torch.nextafter(powers, torch.tensor(0.0))), powers)


@ALL_SCALINGS
def test_power_of_two_scales_are_the_next_ones_above(scaling: Scaling) -> None:
    x = normal(130, 140)
    plain = quantize(x, format=Format.E4M3, scaling=scaling)
    rounded = quantize(x, format=Format.E4M3, scaling=scaling, power_of_two=True)
    mantissa, _ = torch.frexp(rounded.scale)
    assert (mantissa == 0.5).all()
    assert (rounded.scale >= plain.scale).all()
    assert (rounded.scale < 2 * plain.scale).all()


@ALL_SCALINGS
@BOTH_FORMATS
@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_static_scale_of_the_true_maximum_is_the_dynamic_one(
    power_of_two: bool, format: Format, scaling: Scaling
) -> None:
    x = normal(5, 130)
    amax = float(x.abs().max())
    static = quantize(x, format=format, scaling=scaling, power_of_two=power_of_two, amax=amax)
    dynamic = quantize(x, format=format, scaling=Scaling.TENSORWISE, power_of_two=power_of_two)
    assert static.scale.shape == scale_shape(5, 130, scaling)
    assert torch.equal(static.scale, dynamic.scale.expand_as(static.scale))
    assert torch.equal(static.values.view(torch.uint8), dynamic.values.view(torch.uint8))
    assert dynamic.scale.item() == static_scale(amax, format, power_of_two)


@BOTH_FORMATS
def test_a_static_scale_saturates_finite_values_and_no_others(format: Format) -> None:
    x = torch.tensor([[0.5, 1.0, 2.0, -1e38, math.inf, math.nan]])
    quantized = quantize(x, format=format, scaling=Scaling.TENSORWISE, amax=1.0)
    limit = FORMATS[format].max
    assert quantized.values[0, 1:4].float().tolist() == [limit, limit, -limit]
    assert quantized.values[0, 4:].float().isnan().all()


def test_a_finite_value_that_overflows_the_division_saturates() -> None:
    x = torch.tensor([[1e38, -1e38]])
    quantized = quantize(x, format=Format.E4M3, scaling=Scaling.TENSORWISE, amax=0.0)
    assert quantized.values.float().tolist() == [[448.0, -448.0]]


@pytest.mark.parametrize("amax", [-1.0, math.nan, math.inf, 1e39])
def test_an_unusable_static_maximum_is_refused(amax: float) -> None:
    with pytest.raises(InputError, match="amax must be a finite number"):
        quantize(torch.ones(2, 2), format=Format.E4M3, scaling=Scaling.TENSORWISE, amax=amax)


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4)])
def test_what_is_no_matrix_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="a matrix is needed"):
        quantize(torch.ones(shape), format=Format.E4M3, scaling=Scaling.ROWWISE)


def test_a_scale_that_fits_no_scaling_is_refused() -> None:
    with pytest.raises(InputError, match="does not fit a matrix"):
        dequantize(Quantized(torch.zeros(4, 300).to(torch.float8_e4m3fn), torch.ones(2, 2)))


@ALL_SCALINGS
def test_input_dtype_and_strides_do_not_matter(scaling: Scaling) -> None:
    x = normal(140, 130).bfloat16()
    expected = quantize(x.t().contiguous().float(), format=Format.E4M3, scaling=scaling)
    for other in (x.t(), x.t().double(), x.t().contiguous()):
        actual = quantize(other, format=Format.E4M3, scaling=scaling)
        assert torch.equal(actual.values.view(torch.uint8), expected.values.view(torch.uint8))
        assert actual.values.is_contiguous()
        assert torch.equal(actual.scale, expected.scale)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "scaling", "power_of_two"),
    [
        (Format.E4M3, Scaling.ROWWISE, True),
        (Format.E5M2, Scaling.TENSORWISE, False),
        (Format.E4M3, Scaling.BLOCKWISE_1X128, False),
        (Format.E4M3, Scaling.BLOCKWISE_128X128, True),
    ],
)
def test_compiled_quantizers_give_the_same_bits_for_any_batch(
    format: Format, scaling: Scaling, power_of_two: bool
) -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        quantized = quantize(x, format=format, scaling=scaling, power_of_two=power_of_two)
        return quantized.values, quantized.scale

    compiled = torch.compile(both, fullgraph=True, dynamic=True)
    for rows in (3, 17, 256):
        x = normal(rows, 200, seed=rows)
        x[0, 3], x[1, 0], x[2, :] = math.nan, math.inf, 0.0
        values, scale = compiled(x)
        expected_values, expected_scale = both(x)
        assert torch.equal(scale, expected_scale)
        nan = expected_values.float().isnan()
        assert torch.equal(values.float().isnan(), nan)
        assert torch.equal(values.view(torch.uint8)[~nan], expected_values.view(torch.uint8)[~nan])
