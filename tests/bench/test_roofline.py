"""The bound: by hand where a hand can, and its limits where it cannot be known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loka.bench.model.model_variants import MODEL_VARIANTS
from loka.bench.roofline import (
    GemmMath,
    ModelBound,
    Peaks,
    bytes_us,
    passed_sites,
    peaks_of,
    product_us,
    torchao_sites,
)
from loka.graph.sites.site import GemmKind, RowCount, Site

ROUND = Peaks(bandwidth=1e12, flops={GemmMath.BF16: 1e14, GemmMath.FP8: 2e14, GemmMath.FP8_FAST: 4e14})
H100 = Peaks(2.43e12, {GemmMath.BF16: 732e12, GemmMath.FP8: 1277e12, GemmMath.FP8_FAST: 1352e12})
SERVED = ModelBound(batch=4096, training=False, peaks=H100, optimizer="adam", parameter_bytes=4000)
TRAINED = replace(SERVED, training=True)
BY_NAME = {variant.name: variant for variant in MODEL_VARIANTS}


def site(
    name: str,
    kind: GemmKind = GemmKind.LINEAR,
    fed_by: tuple[str, ...] = (),
    k: int = 1024,
    n: int = 512,
    owner: str = "layer",
    calls: int = 1,
) -> Site:
    return Site(
        name=name, kind=kind, owner=owner, weight=None, bias=None, rows=RowCount(1), k=k, n=n, calls=calls,
        calls_eval=calls, share=0.1, input_grad=True, fed_by=fed_by, followed_by=(), where="",
    )  # fmt: skip


def served_us(*sites: Site) -> float:
    """Of an inference in which the site `fp8` is."""
    found = SERVED.milliseconds(sites, frozenset({"fp8"}), GemmMath.FP8)
    assert found is not None
    return 1e3 * found


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


def test_without_a_peak_there_is_no_bound() -> None:
    assert TRAINED.of_variant(BY_NAME["tf32"], [site("one")]) is None


def test_a_model_is_the_sum_of_its_sites() -> None:
    one, other = served_us(site("plain")), served_us(site("fp8"))
    assert one == pytest.approx(product_us(4096, 512, 1024, GemmMath.BF16, H100))
    assert other == pytest.approx(product_us(4096, 512, 1024, GemmMath.FP8, H100))
    assert served_us(site("plain"), site("fp8")) == pytest.approx(one + other)


def test_calls_and_passes_of_a_site_count() -> None:
    once = served_us(site("fp8"))
    assert served_us(site("fp8", calls=2)) == pytest.approx(2 * once)
    assert served_us(site("fp8", fed_by=("silu",))) == pytest.approx(once + bytes_us(4096 * 1024 * 3, H100))


def test_training_an_fp8_site_adds_backward_passes_its_weight_and_the_optimiser() -> None:
    rows, k, n = 4096, 1024, 512
    products = sum(product_us(*sizes, GemmMath.FP8, H100) for sizes in ((rows, n, k), (rows, k, n), (n, k, rows)))
    passes = rows * k * ((2 + 2) + (4 + 2)) + n * k * 4
    for optimizer, each in (("sgd", 3), ("adagrad", 5), ("adam", 7)):
        bound = replace(TRAINED, optimizer=optimizer)
        found = bound.milliseconds([site("fp8", fed_by=("silu",))], frozenset({"fp8"}), GemmMath.FP8)
        assert found == pytest.approx((products + bytes_us(passes + each * 4000, H100)) / 1e3)


def test_a_linear_has_a_pass_where_something_elementwise_feeds_it() -> None:
    sites = [
        site("fed", fed_by=("silu", "layer_norm", "linear")),
        site("second", fed_by=("silu",)),
        site("straight", fed_by=("linear",)),
        site("first"),
    ]
    assert passed_sites(sites, batch=100) == {"fed", "second"}


def test_products_of_one_module_read_one_tensor() -> None:
    sites = [
        site("rank", GemmKind.MATMUL, ("layer_norm", "add"), k=16),
        site("products", GemmKind.BMM, ("layer_norm", "add"), k=32),
        site("compress", GemmKind.MATMUL, ("layer_norm", "add"), k=16),
        site("unfed", GemmKind.MATMUL, (), k=64),
        site("elsewhere", GemmKind.MATMUL, ("add",), k=16, owner="other"),
    ]
    assert passed_sites(sites, 10) == {"products", "elsewhere"}


def test_torchao_takes_wide_linears_alone() -> None:
    sites = [
        site("wide", k=512, n=64),
        site("narrow", k=256, n=64),
        site("odd", k=512, n=65),
        site("matmul", GemmKind.MATMUL, k=512, n=64),
    ]
    assert torchao_sites(sites) == {"wide"}
    expected = TRAINED.milliseconds(sites, frozenset({"wide"}), GemmMath.FP8_FAST)
    assert TRAINED.of_variant(BY_NAME["torchao-rowwise"], sites) == expected
    assert TRAINED.of_variant(BY_NAME["bf16"], sites) == TRAINED.milliseconds(sites, frozenset(), GemmMath.BF16)
