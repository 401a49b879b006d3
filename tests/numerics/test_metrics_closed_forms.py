"""MERE and SQNR against closed forms, the reference product, and what cannot be compared."""

from __future__ import annotations

import math

import pytest
import torch

from loka.errors import InputError
from loka.numerics.enums import Format, Scaling
from loka.numerics.metrics import FLOOR, mere, sqnr
from loka.numerics.quantize import dequantize, quantize, reference_scaled_mm


def test_mere_of_known_vectors() -> None:
    ref = torch.tensor([1.0, -2.0, 4.0])
    result = mere(torch.tensor([1.1, -2.0, 3.0]), ref)
    assert result.value == pytest.approx((0.1 + 0.0 + 0.25) / 3, rel=1e-6)
    assert result.floored == 0.0


def test_mere_floors_small_references_and_says_how_many() -> None:
    ref = torch.tensor([3.0, 0.0, 1e-9, 3.0], dtype=torch.float64)
    rms = math.sqrt(18.0 / 4)
    error = 1e-4
    result = mere(ref + error, ref)
    floor = FLOOR * rms
    assert result.value == pytest.approx((2 * error / 3.0 + 2 * error / floor) / 4, rel=1e-9)
    assert result.floored == 0.5


def test_mere_without_a_floor_is_infinite_where_a_zero_is_missed() -> None:
    ref = torch.tensor([1.0, 0.0])
    assert mere(torch.tensor([1.0, 0.1]), ref, floor=0.0).value == math.inf
    assert mere(torch.tensor([1.5, 0.0]), ref, floor=0.0).value == 0.25


def test_mere_of_uniform_relative_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    ref = torch.rand(200_000, generator=generator, dtype=torch.float64) + 1.0
    noise = (torch.rand(200_000, generator=generator, dtype=torch.float64) * 2 - 1) * 0.1
    assert mere(ref * (1 + noise), ref).value == pytest.approx(0.05, rel=0.01)


@pytest.mark.parametrize("bits", [4, 8, 12])
def test_sqnr_of_uniform_quantization_is_six_db_a_bit(bits: int) -> None:
    """A full-scale uniform signal rounded to steps of 2 / 2^bits: signal 1/3, noise step^2 / 12, ratio 4^bits."""
    signal = torch.rand(400_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 - 1
    step = 2.0 / 2**bits
    quantized = (signal / step).round() * step
    assert sqnr(quantized, signal) == pytest.approx(20 * bits * math.log10(2), abs=0.05)


def test_sqnr_of_known_vectors() -> None:
    ref = torch.tensor([3.0, 4.0])
    assert sqnr(torch.tensor([3.0, 4.5]), ref) == pytest.approx(20.0)
    assert sqnr(ref, ref) == math.inf


def test_sqnr_does_not_depend_on_the_unit_and_is_computed_in_float64() -> None:
    ref = torch.tensor([3.0e30, 4.0e30])  # the squares overflow float32
    assert sqnr(torch.tensor([3.0e30, 4.5e30]), ref) == pytest.approx(20.0, abs=1e-4)


def test_an_all_zero_reference() -> None:
    zeros = torch.zeros(3)
    assert sqnr(zeros, zeros) == math.inf
    assert sqnr(torch.ones(3), zeros) == -math.inf
    assert mere(zeros, zeros).value == 0.0
    assert mere(torch.ones(3), zeros).value == math.inf
    assert mere(zeros, zeros).floored == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_result_that_is_not_finite_fails_every_budget(bad: float) -> None:
    ref = torch.ones(4)
    out = ref.clone()
    out[2] = bad
    assert mere(out, ref).value == math.inf
    assert sqnr(out, ref) == -math.inf


@pytest.mark.parametrize("metric", [mere, sqnr])
def test_what_cannot_be_compared_is_refused(metric) -> None:
    with pytest.raises(InputError, match=r"\(3,\) and ref \(4,\)"):
        metric(torch.ones(3), torch.ones(4))
    with pytest.raises(InputError, match="nothing to compare"):
        metric(torch.empty(0), torch.empty(0))
    with pytest.raises(InputError, match="2 of 3 elements of ref are not finite"):
        metric(torch.ones(3), torch.tensor([1.0, math.nan, math.inf]))


@pytest.mark.parametrize("floor", [-1.0, math.nan, math.inf])
def test_an_unusable_floor_is_refused(floor: float) -> None:
    with pytest.raises(InputError, match="floor"):
        mere(torch.ones(3), torch.ones(3), floor=floor)


def test_rounding_to_e4m3_has_the_sqnr_of_its_mantissa() -> None:
    """Within a binade of e4m3 the step is 2^-3 of its lower end: for |x| uniform in [1, 2), 7/3 over (1/8)^2 / 12."""
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(64, 4096, generator=generator) + 1.0
    rounded = dequantize(quantize(x, format=Format.E4M3, scaling=Scaling.TENSORWISE, amax=448.0))
    assert sqnr(rounded, x) == pytest.approx(10 * math.log10((7 / 3) / ((1 / 8) ** 2 / 12)), abs=0.1)


@pytest.mark.parametrize("scaling_a", list(Scaling))
@pytest.mark.parametrize("scaling_b", list(Scaling))
def test_the_reference_product_is_that_of_the_dequantized_operands(scaling_a: Scaling, scaling_b: Scaling) -> None:
    generator = torch.Generator().manual_seed(3)
    a = quantize(torch.randn(3, 479, generator=generator), format=Format.E4M3, scaling=scaling_a)
    b = quantize(torch.randn(24, 479, generator=generator), format=Format.E5M2, scaling=scaling_b)
    exact = dequantize(a).double() @ dequantize(b).double().t()
    out = reference_scaled_mm(a.values, a.scale, b.values, b.scale, torch.float32)
    assert out.dtype is torch.float32
    assert sqnr(out, exact) > 120.0


def test_a_reference_product_of_shapes_that_do_not_fit_is_refused() -> None:
    a, b = torch.zeros(2, 3).to(torch.float8_e4m3fn), torch.zeros(2, 4).to(torch.float8_e4m3fn)
    with pytest.raises(InputError, match=r"a is \(2, 3\) and b is \(2, 4\)"):
        reference_scaled_mm(a, torch.ones(1, 1), b, torch.ones(1, 1), torch.float32)
