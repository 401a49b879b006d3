"""The study of short layers' products: its ways on the CPU, and its table."""

from __future__ import annotations

import pytest

from benchmarks.short_products import ROWWISE, TENSORWISE, ShortProduct, measured, products, table, ways
from loka.bench.record.clock import Span
from loka.bench.record.gemm_parts import Gemms
from loka.errors import LokaError
from loka.numerics.enums import Gemm

SHORT = {gemm: ShortProduct(gemm, 128, 32, 64) for gemm in Gemm}


def test_each_gemm_has_its_sizes_and_scaling() -> None:
    assert {gemm: short.sizes for gemm, short in SHORT.items()} == {
        Gemm.FPROP: (128, 64, 32),
        Gemm.DGRAD: (128, 32, 64),
        Gemm.WGRAD: (64, 32, 128),
    }
    assert {short.recipe for short in SHORT.values()} == {ROWWISE, TENSORWISE}
    assert len(products()) == 36
    swapped = SHORT[Gemm.WGRAD].part(swapped=True)
    assert (swapped.rows, swapped.columns, swapped.contraction) == (32, 64, 128)


@pytest.mark.parametrize("gemm", Gemm, ids=str)
def test_every_way_is_checked_and_timed(gemm: Gemm) -> None:
    called = []

    def timer(call: object, arguments: object) -> Span:
        called.append(call)
        return Span(float(len(called)), 0.0, 2)

    found = measured(timer, [SHORT[gemm]], Gemms("cpu"))[SHORT[gemm]]
    assert list(found) == [name for name, _ in ways(SHORT[gemm], Gemms("cpu"))]
    assert list(found.values()) == [float(count + 1) for count in range(len(found))]


def test_a_wrong_result_ends_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.short_products.in_parts", lambda a, scale_a, b, scale_b: a.float() @ b.float().t())
    with pytest.raises(LokaError, match="fp8 in 4 parts"):
        measured(lambda *_: Span(1.0, 0.0, 2), [SHORT[Gemm.WGRAD]], Gemms("cpu"))


def test_the_table_names_the_fastest_way_and_its_share_of_the_bound() -> None:
    text = table({SHORT[Gemm.FPROP]: {"bf16": 8.0, "fp8": 10.0, "fp8 to fp8": 5.0}}, lambda part: 2.5)
    assert text.splitlines()[-1] == "| fprop | 128 | 32 | 64 | 2.5 | 8.0 | 10.0 | - | - | 5.0 | fp8 to fp8 | 50 % |"
