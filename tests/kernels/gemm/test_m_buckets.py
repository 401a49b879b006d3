"""One operator, several kernels: the table decides by the rows of the batch, and the count says which one ran."""

from __future__ import annotations

import pytest
import torch

from loka.errors import InputError
from loka.kernels import call_counters
from loka.kernels.gemm.catalogue import operator_named
from loka.kernels.gemm.m_buckets import mm_by_k_bucket, mm_by_m_bucket, parse_table, table_text
from loka.kernels.gemm.scaled_mm import scaled_mm
from loka.numerics.enums import Format, Scaling

TABLE = "4: torch.scaled_mm, 8: fbgemm.rowwise"
ROWWISE = (Scaling.ROWWISE, Scaling.ROWWISE)


def test_a_table_is_text_and_back() -> None:
    rows = ((4, "torch.scaled_mm"), (8, "fbgemm.rowwise"))
    assert table_text(rows) == TABLE
    assert parse_table(TABLE) == rows


@pytest.mark.parametrize("rows", [[], [(8, "a.b"), (4, "c.d")], [(8, "a.b"), (8, "c.d")], [(-1, "a.b")]])
def test_a_table_ascends(rows) -> None:
    with pytest.raises(InputError, match="limits that ascend"):
        table_text(rows)


@pytest.mark.parametrize("text", ["torch.scaled_mm", "4:torch.scaled_mm", "x: torch.scaled_mm", "04: torch.scaled_mm"])
def test_what_is_no_table(text: str) -> None:
    with pytest.raises(InputError, match="is no table of kernels by rows"):
        parse_table(text)


@pytest.mark.parametrize("gemm", [mm_by_m_bucket, mm_by_k_bucket])
def test_each_batch_runs_on_its_kernel(gemm, make_recipe, make_product, numbers: int) -> None:
    ran = []
    for size in (1, 4, 5, 8, 9, 40):
        sizes = (size, 7, 16) if gemm is mm_by_m_bucket else (7, 16, size)
        product = make_product(make_recipe((Format.E4M3, Format.E4M3), ROWWISE), *sizes)
        operands = (product.a, product.scale_a, product.b, product.scale_b, "rowwise", "rowwise")
        before = call_counters.counts(numbers)
        bias = torch.randn(sizes[1])
        out = gemm(*operands, torch.float32, False, numbers, TABLE, bias)
        ran += [kernel for kernel, count in call_counters.counts(numbers).items() if count > before.get(kernel, 0)]
        expected = operator_named(ran[-1])(*operands, torch.float32, False, numbers + 1, bias)
        assert torch.equal(out, expected)
    assert ran == ["torch.scaled_mm"] * 2 + ["fbgemm.rowwise"] * 4


def test_without_rows_it_is_the_first(numbers: int) -> None:
    empty = torch.zeros(0, 16, dtype=torch.float8_e4m3fn), torch.ones(0, 1)
    other = torch.zeros(3, 16, dtype=torch.float8_e4m3fn), torch.ones(3, 1)
    assert mm_by_m_bucket(*empty, *other, "rowwise", "rowwise", torch.float32, False, numbers, TABLE).shape == (0, 3)
    assert call_counters.counts(numbers) == {"torch.scaled_mm": 1}


def test_a_kernel_that_is_not_in_the_catalogue_is_refused(numbers: int) -> None:
    a = torch.zeros(3, 16, dtype=torch.float8_e4m3fn), torch.ones(3, 1)
    with pytest.raises(InputError, match=r"there is no kernel 'triton\.gemm'"):
        mm_by_m_bucket(*a, *a, "rowwise", "rowwise", torch.float32, False, numbers, "8: triton.gemm")
    with pytest.raises(InputError, match=r"there is no kernel 'x\.y'"):
        mm_by_m_bucket(*a, *a, "rowwise", "rowwise", torch.float32, False, numbers, "8: x.y")


@pytest.mark.slow
def test_the_operator_is_well_formed(numbers: int) -> None:
    a = torch.ones(3, 16).to(torch.float8_e4m3fn), torch.ones(3, 1)
    arguments = (*a, *a, "rowwise", "rowwise", torch.float32, False, numbers, TABLE)
    utils = ("test_faketensor", "test_aot_dispatch_dynamic")  # test_schema multiplies, which FP8 has not
    torch.library.opcheck(torch.ops.loka.mm_by_m_bucket.default, arguments, test_utils=utils)
    torch.library.opcheck(torch.ops.loka.mm_by_k_bucket.default, arguments, test_utils=utils)
    torch.library.opcheck(torch.ops.loka.fbgemm_rowwise_mm.default, arguments[:9], test_utils=utils)


@pytest.mark.slow
def test_any_number_of_rows_is_one_compilation(numbers: int) -> None:
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def product(a, scale_a, b, scale_b):
        y = mm_by_m_bucket(a, scale_a, b, scale_b, "rowwise", "rowwise", torch.float32, False, numbers, TABLE)
        return y * 2.0

    b, scale_b = torch.randn(7, 16).to(torch.float8_e4m3fn), torch.rand(7, 1)
    for rows in (2, 3, 4, 5, 8, 9, 17, 64, 100, 4096):
        a, scale_a = torch.randn(rows, 16).to(torch.float8_e4m3fn), torch.rand(rows, 1)
        expected = scaled_mm(a, scale_a, b, scale_b, "rowwise", "rowwise", torch.float32, False, numbers + 1)
        torch.testing.assert_close(product(a, scale_a, b, scale_b), expected * 2.0, rtol=2**-7, atol=1e-5)
    assert len(graphs) == 1
    assert call_counters.counts(numbers) == {"torch.scaled_mm": 3, "fbgemm.rowwise": 7}
