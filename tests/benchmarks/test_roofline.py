"""The bound: by hand where a hand can, and its limits where it cannot be known."""

from __future__ import annotations

import pytest

from benchmarks.roofline import GemmMath, Peaks, bytes_us, peaks_of, product_us

ROUND = Peaks(bandwidth=1e12, flops={GemmMath.BF16: 1e14, GemmMath.FP8: 2e14, GemmMath.FP8_FAST: 4e14})
H100 = Peaks(2.43e12, {GemmMath.BF16: 732e12, GemmMath.FP8: 1277e12, GemmMath.FP8_FAST: 1352e12})


def test_a_large_product_takes_its_flops_and_a_small_one_its_bytes() -> None:
    assert product_us(10_000, 10_000, 10_000, GemmMath.BF16, ROUND) == pytest.approx(2e12 / 1e14 * 1e6)
    assert product_us(10_000, 10_000, 10_000, GemmMath.FP8, ROUND) == pytest.approx(2e12 / 2e14 * 1e6)
    small = 2 * 10 * (1000 + 20) + 2 * 1000 * 20
    assert product_us(1000, 20, 10, GemmMath.BF16, ROUND) == pytest.approx(small / 1e12 * 1e6)
    fp8 = 10 * (1000 + 20) + 2 * 1000 * 20
    assert product_us(1000, 20, 10, GemmMath.FP8, ROUND) == pytest.approx(fp8 / 1e12 * 1e6)


def test_bytes_take_the_bandwidth() -> None:
    assert bytes_us(2.43e12, H100) == pytest.approx(1e6)


def test_a_device_that_was_not_measured_has_no_peaks() -> None:
    assert peaks_of("NVIDIA H100 80GB HBM3") == H100
    assert peaks_of("some other device") is None
    assert peaks_of("NVIDIA H200") not in (None, H100)
    assert peaks_of("") is None
