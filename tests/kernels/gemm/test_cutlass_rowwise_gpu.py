"""FBGEMM's and MSLK's GEMM on a Hopper GPU: right at every size, in a graph, and counted as itself."""

from __future__ import annotations

import itertools

import pytest
import torch

from loka.errors import InputError
from loka.kernels import call_counters
from loka.kernels.gemm import fbgemm, mslk
from loka.kernels.gemm.cutlass_rowwise import CutlassRowwise
from loka.numerics.enums import Format, Scaling
from tests.support.gpu import ON_HOPPER

pytestmark = ON_HOPPER

SIZES = [*itertools.product((1, 3, 17), (1, 8, 24), (13, 16, 479)), (130, 272, 384), (256, 128, 1024), (4093, 256, 512)]
E4M3 = (Format.E4M3, Format.E4M3)
ROWWISE = (Scaling.ROWWISE, Scaling.ROWWISE)


@pytest.fixture(params=[fbgemm.ROWWISE, mslk.ROWWISE], ids=lambda kernel: kernel.name)
def kernel(request: pytest.FixtureRequest) -> CutlassRowwise:
    found: CutlassRowwise = request.param
    if found.library.missing_reason() is not None:
        pytest.skip(found.library.missing_reason())
    assert found.unavailable_reason() is None
    return found


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
def test_it_is_right_at_every_size(kernel, fast: bool, bias, make_recipe, make_product, numbers: int) -> None:
    operator = getattr(torch.ops.loka, kernel.operator.partition("::")[2]).default
    for sizes in SIZES:
        product = make_product(make_recipe(E4M3, ROWWISE), *sizes, "cuda")
        added = None if bias is None else torch.randn(sizes[1], device="cuda").to(bias)
        operands = (product.a, product.scale_a, product.b, product.scale_b)
        out = operator(*operands, "rowwise", "rowwise", torch.bfloat16, fast, numbers, added)
        exact = product.exact if added is None else product.exact + added.double()
        magnitude = product.magnitude if added is None else product.magnitude + added.double().abs()
        assert out.shape == sizes[:2]
        assert out.is_contiguous()
        # The result is rounded to bfloat16; a bfloat16 bias is added to a product that was rounded before.
        allowed = 2**-8 * exact.abs() + (2e-3 if fast else 5e-4) * magnitude
        if bias is torch.bfloat16:
            allowed += 2**-8 * product.exact.abs()
        assert ((out.double() - exact).abs() <= allowed).all(), sizes
    assert call_counters.counts(numbers) == {kernel.name: len(SIZES)}


def test_a_graph_counts_its_capture_and_replays_the_kernel(kernel, make_recipe, make_product, numbers: int) -> None:
    operator = getattr(torch.ops.loka, kernel.operator.partition("::")[2]).default
    product = make_product(make_recipe(E4M3, ROWWISE), 256, 128, 512, "cuda")
    operands = (product.a, product.scale_a, product.b, product.scale_b)
    expected = operator(*operands, "rowwise", "rowwise", torch.bfloat16, False, numbers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = operator(*operands, "rowwise", "rowwise", torch.bfloat16, False, numbers)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
    assert call_counters.counts(numbers) == {kernel.name: 2}


def test_e5m2_is_refused_as_planning_refuses_it(kernel, make_recipe, make_product, numbers: int) -> None:
    operator = getattr(torch.ops.loka, kernel.operator.partition("::")[2]).default
    product = make_product(make_recipe((Format.E5M2, Format.E4M3), ROWWISE), 256, 128, 512, "cuda")
    with pytest.raises(InputError, match="multiplies e4m3 x e4m3, not e5m2 x e4m3"):
        operator(
            product.a, product.scale_a, product.b, product.scale_b, "rowwise", "rowwise", torch.bfloat16, False, numbers
        )
    assert not call_counters.counts(numbers)
