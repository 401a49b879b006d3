"""The bound of a model's step: what its sites and its optimiser count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loka.bench.model.model_variants import MODEL_VARIANTS
from loka.bench.roofline import GemmMath, ModelBound, Peaks, bytes_us, model_us, site_works, torchao_sites
from loka.sites.site import GemmKind, RowCount, Site

PEAKS = Peaks(1e12, {GemmMath.BF16: 1e14, GemmMath.FP8: 2e14, GemmMath.FP8_FAST: 4e14})
BOUND = ModelBound(batch=128, training=True, peaks=PEAKS, optimizer="adam", parameter_bytes=4000)
BY_NAME = {variant.name: variant for variant in MODEL_VARIANTS}


def site(name: str, kind: GemmKind, fed_by: tuple[str, ...], k: int = 8, owner: str = "layer", n: int = 4) -> Site:
    return Site(
        name=name, kind=kind, owner=owner, weight=None, bias=None, rows=RowCount(1), k=k, n=n, calls=2,
        calls_eval=2, share=0.1, input_grad=True, fed_by=fed_by, followed_by=(), where="",
    )  # fmt: skip


def test_a_linear_has_a_pass_where_something_elementwise_feeds_it() -> None:
    sites = [
        site("fed", GemmKind.LINEAR, ("silu", "layer_norm", "linear")),
        site("straight", GemmKind.LINEAR, ("linear",)),
        site("first", GemmKind.LINEAR, ()),
    ]
    works = site_works(sites, batch=100, fp8=frozenset({"fed"}))
    assert [work.fed for work in works] == [800, 0, 0]
    assert [work.fp8 for work in works] == [True, False, False]
    assert [(work.rows, work.k, work.n, work.calls) for work in works] == [(100, 8, 4, 2)] * 3


def test_products_of_one_module_read_one_tensor() -> None:
    sites = [
        site("rank", GemmKind.MATMUL, ("layer_norm", "add"), k=16),
        site("products", GemmKind.BMM, ("layer_norm", "add"), k=32),
        site("compress", GemmKind.MATMUL, ("layer_norm", "add"), k=16),
        site("unfed", GemmKind.MATMUL, (), k=64),
        site("elsewhere", GemmKind.MATMUL, ("add",), k=16, owner="other"),
    ]
    assert [work.fed for work in site_works(sites, 10, frozenset())] == [0, 320, 0, 0, 160]


def test_torchao_takes_wide_linears_alone() -> None:
    sites = [
        site("wide", GemmKind.LINEAR, (), k=512, n=64),
        site("narrow", GemmKind.LINEAR, (), k=256, n=64),
        site("odd", GemmKind.LINEAR, (), k=512, n=65),
        site("matmul", GemmKind.MATMUL, (), k=512, n=64),
    ]
    assert torchao_sites(sites) == {"wide"}
    fp8 = model_us(site_works(sites, 128, frozenset({"wide"})), GemmMath.FP8_FAST, True, PEAKS)
    assert fp8 is not None
    found = BOUND.of_variant(BY_NAME["torchao-rowwise"], sites)
    assert found == pytest.approx((fp8 + bytes_us(7 * 4000, PEAKS)) / 1e3)


def test_a_training_step_has_its_optimiser_and_an_inference_has_none() -> None:
    sites = [site("one", GemmKind.LINEAR, ())]
    works = site_works(sites, 128, frozenset())
    trained, served = (model_us(works, GemmMath.BF16, training, PEAKS) for training in (True, False))
    assert trained is not None
    assert served is not None
    variant = BY_NAME["bf16"]
    for optimizer, passes in (("sgd", 3), ("adagrad", 5), ("adam", 7)):
        found = replace(BOUND, optimizer=optimizer).of_variant(variant, sites)
        assert found == pytest.approx((trained + bytes_us(passes * 4000, PEAKS)) / 1e3)
    assert replace(BOUND, training=False).of_variant(variant, sites) == pytest.approx(served / 1e3)


def test_without_a_peak_there_is_no_bound() -> None:
    assert BOUND.of_variant(BY_NAME["tf32"], [site("one", GemmKind.LINEAR, ())]) is None
