"""The bound: by hand where a hand can, and its limits where it cannot be known."""

from __future__ import annotations

import math

import pytest

from loka.bench.roofline import GemmMath, Peaks, SiteWork, bytes_us, model_us, peaks_of, product_us

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


def test_a_precision_without_a_peak_has_no_bound() -> None:
    assert model_us([SiteWork(8, 8, 8, 1, False, 0)], GemmMath.TF32, True, H100) is None


def test_a_device_that_was_not_measured_has_no_peaks() -> None:
    assert peaks_of("NVIDIA H100 80GB HBM3") == H100
    assert peaks_of("some other device") is None
    assert peaks_of("NVIDIA H200") not in (None, H100)
    assert peaks_of("") is None


def test_a_model_is_the_sum_of_its_sites() -> None:
    plain = SiteWork(rows=4096, k=1024, n=512, calls=1, fp8=False, fed=0)
    fp8 = SiteWork(rows=4096, k=1024, n=512, calls=1, fp8=True, fed=0)
    one = model_us([plain], GemmMath.FP8, False, H100)
    other = model_us([fp8], GemmMath.FP8, False, H100)
    both = model_us([plain, fp8], GemmMath.FP8, False, H100)
    assert one == pytest.approx(product_us(4096, 512, 1024, GemmMath.BF16, H100))
    assert other == pytest.approx(product_us(4096, 512, 1024, GemmMath.FP8, H100))
    assert both is not None
    assert math.isclose(both, one + other)


def test_calls_and_passes_of_a_site_count() -> None:
    once = model_us([SiteWork(4096, 1024, 512, 1, True, 0)], GemmMath.FP8, False, H100)
    twice = model_us([SiteWork(4096, 1024, 512, 2, True, 0)], GemmMath.FP8, False, H100)
    fed = model_us([SiteWork(4096, 1024, 512, 1, True, 4096 * 1024)], GemmMath.FP8, False, H100)
    assert once is not None
    assert twice == pytest.approx(2 * once)
    assert fed == pytest.approx(once + bytes_us(4096 * 1024 * 3, H100))


def test_training_an_fp8_site_adds_backward_passes_and_its_weight() -> None:
    rows, k, n = 4096, 1024, 512
    products = sum(product_us(*sizes, GemmMath.FP8, H100) for sizes in ((rows, n, k), (rows, k, n), (n, k, rows)))
    passes = rows * k * ((2 + 2) + (4 + 2)) + n * k * 4
    found = model_us([SiteWork(rows, k, n, 1, True, rows * k)], GemmMath.FP8, True, H100)
    assert found == pytest.approx(products + bytes_us(passes, H100))
