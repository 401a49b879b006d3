"""The operator on a Hopper GPU: all that the catalogue allows is right, and all that it refuses does fail there."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from loka.errors import InputError
from loka.kernels import call_counters
from loka.kernels.gemm import scaled_mm_operands
from loka.kernels.gemm.catalogue import SCALED_MM, GemmRequest
from loka.kernels.gemm.scaled_mm import scaled_mm
from loka.numerics.enums import Accumulation, Format, Gemm, Scaling
from loka.numerics.quantize import FORMATS, quantize
from loka.numerics.recipe import OperandRecipe
from loka.numerics.scalings import PROBED
from tests.support.gpu import ON_HOPPER

pytestmark = ON_HOPPER

SIZES = [*itertools.product((1, 3, 17), (1, 24), (13, 479)), (130, 272, 384), (256, 128, 1024), (4093, 256, 512)]
TOLERANCE = {Accumulation.PRECISE: 5e-4, Accumulation.FAST: 2e-3}  # of |a| @ |b|.T
TYPES = {
    Scaling.TENSORWISE: ScalingType.TensorWise,
    Scaling.ROWWISE: ScalingType.RowWise,
    Scaling.BLOCKWISE_1X128: ScalingType.BlockWise1x128,
    Scaling.BLOCKWISE_128X128: ScalingType.BlockWise128x128,
}
RECIPES = list(
    itertools.product(itertools.product(Format, Format), itertools.product(TYPES, TYPES), list(Accumulation))
)


def refusal(formats, scalings, accumulation: Accumulation, padding: bool = True, m=64, k=256, n=64) -> str | None:
    first, second = (OperandRecipe(format=f, scaling=s) for f, s in zip(formats, scalings, strict=True))
    return SCALED_MM.unsupported_reason(
        GemmRequest(Gemm.FPROP, (first, second), accumulation, padding, m, k, n, "h100")
    )


def name(recipe) -> str:
    formats, scalings, accumulation = recipe
    return "-".join([f"{f.value}_{s.value}" for f, s in zip(formats, scalings, strict=True)] + [accumulation.value])


ALLOWED = [recipe for recipe in RECIPES if refusal(*recipe) is None]
REFUSED = [recipe for recipe in RECIPES if refusal(*recipe) is not None]
PAIRS = sorted({scalings for _, scalings, _ in ALLOWED})
E4M3 = (Format.E4M3, Format.E4M3)


def torch_directly(formats, scalings, accumulation: Accumulation, m: int, k: int, n: int) -> Tensor:
    """The kernel without LoKA's padding and refusals, its scales laid out as it wants them."""
    a = quantize(torch.randn(m, k, device="cuda"), format=formats[0], scaling=scalings[0])
    b = quantize(torch.randn(n, k, device="cuda"), format=formats[1], scaling=scalings[1])
    out = F.scaled_mm(
        a.values,
        b.values.t(),
        scaled_mm_operands.first_scale(a.scale, scalings[0], m),
        TYPES[scalings[0]],
        scaled_mm_operands.second_scale(b.scale, scalings[1], n),
        TYPES[scalings[1]],
        output_dtype=torch.float32,
        use_fast_accum=accumulation is Accumulation.FAST,
    )
    torch.cuda.synchronize()
    return out


def test_the_tables_are_not_empty() -> None:
    assert len(ALLOWED) == 3 * 2 * 2 + 3
    assert len(REFUSED) == 4 * 16 * 2 - len(ALLOWED)


@pytest.mark.parametrize("recipe", ALLOWED, ids=name)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_what_is_allowed_is_right_at_every_size(
    recipe, power_of_two: bool, make_recipe, make_product, numbers: int
) -> None:
    formats, scalings, accumulation = recipe
    for rows, columns, contraction in SIZES:
        product = make_product(make_recipe(formats, scalings, power_of_two), rows, columns, contraction, "cuda")
        out = product.run(fast=accumulation is Accumulation.FAST, counter_id=numbers)
        assert out.shape == (rows, columns)
        assert out.is_contiguous()
        error = (out.double() - product.exact).abs()
        assert (error <= TOLERANCE[accumulation] * product.magnitude).all(), (rows, columns, contraction)
    assert call_counters.count(numbers) == len(SIZES)


@pytest.mark.parametrize("recipe", REFUSED, ids=name)
def test_what_is_refused_fails_in_torch_and_is_an_error_in_the_operator(
    recipe, make_recipe, make_product, numbers: int
) -> None:
    formats, scalings, accumulation = recipe
    with pytest.raises((ValueError, RuntimeError)):
        torch_directly(formats, scalings, accumulation, 64, 256, 64)
    product = make_product(make_recipe(formats, scalings), 64, 64, 256, "cuda")
    with pytest.raises(InputError, match="on this GPU"):
        product.run(fast=accumulation is Accumulation.FAST, counter_id=numbers)
    assert call_counters.count(numbers) == 0


@pytest.mark.parametrize("scalings", PAIRS, ids=lambda pair: f"{pair[0].value}-{pair[1].value}")
@pytest.mark.parametrize("size", [(64, 13, 64), (64, 256, 24), (64, 256, 1), (63, 256, 64), (66, 256, 64)])
def test_sizes_that_are_refused_without_padding_fail_in_torch_and_the_others_run(scalings, size) -> None:
    m, k, n = size
    reason = refusal(E4M3, scalings, Accumulation.PRECISE, padding=False, m=m, k=k, n=n)
    if reason is None:
        assert torch_directly(E4M3, scalings, Accumulation.PRECISE, m, k, n).shape == (m, n)
    else:
        with pytest.raises((ValueError, RuntimeError)):
            torch_directly(E4M3, scalings, Accumulation.PRECISE, m, k, n)


@pytest.mark.parametrize("scalings", PAIRS, ids=lambda pair: f"{pair[0].value}-{pair[1].value}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_dtype_of_the_result(dtype, scalings, make_recipe, make_product, numbers: int) -> None:
    product = make_product(make_recipe(E4M3, scalings), 17, 24, 479, "cuda")
    # within float16's range: the operands are not
    scale = product.exact.abs().max().float() / 1000
    small = scaled_mm(
        product.a,
        product.scale_a / scale,
        product.b,
        product.scale_b,
        scalings[0].value,
        scalings[1].value,
        dtype,
        fast=False,
        counter_id=numbers,
    )
    assert small.dtype is dtype
    bound = 5e-4 * product.magnitude / scale + 2.0**-8 * product.exact.abs() / scale + 1e-6
    assert ((small.double() - product.exact / scale).abs() <= bound).all()


@pytest.mark.parametrize("scalings", PAIRS, ids=lambda pair: f"{pair[0].value}-{pair[1].value}")
@pytest.mark.parametrize("sizes", [(0, 24, 13), (3, 0, 13), (3, 24, 0), (0, 0, 0)])
def test_empty_operands_give_zeros(sizes, scalings, make_recipe, quantize_product, numbers: int) -> None:
    rows, columns, contraction = sizes
    a, b = torch.ones(rows, contraction, device="cuda"), torch.ones(columns, contraction, device="cuda")
    out = quantize_product(make_recipe(E4M3, scalings), a, b).run(torch.bfloat16, counter_id=numbers)
    assert out.shape == (rows, columns)
    assert (out == 0).all()
    assert call_counters.count(numbers) == 1


@pytest.mark.parametrize("scalings", PAIRS, ids=lambda pair: f"{pair[0].value}-{pair[1].value}")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_spoils_that_row_alone(bad: float, scalings, make_recipe, quantize_product, numbers: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(200, 130, generator=generator), torch.randn(140, 130, generator=generator)
    a[7, 3], b[11, 129] = bad, bad
    a[9], b[13] = 0.0, 0.0
    out = (
        quantize_product(make_recipe(E4M3, scalings), a.cuda(), b.cuda()).run(torch.bfloat16, counter_id=numbers).cpu()
    )
    poisoned = torch.zeros(200, 140, dtype=torch.bool)
    poisoned[7] = True
    poisoned[:, 11] = True
    assert torch.equal(~out.isfinite(), poisoned)
    assert (out[9][~poisoned[9]] == 0).all()
    assert (out[:, 13][~poisoned[:, 13]] == 0).all()


def test_a_single_row_with_the_strides_of_a_transposed_column(numbers: int) -> None:
    column = quantize(torch.randn(32, 1, device="cuda"), format=Format.E4M3, scaling=Scaling.TENSORWISE)
    row = column.values.t()
    assert row.is_contiguous()
    weight = quantize(torch.randn(16, 32, device="cuda"), format=Format.E4M3, scaling=Scaling.TENSORWISE)
    names = ("tensorwise", "tensorwise")
    out = scaled_mm(
        row, column.scale, weight.values, weight.scale, *names, torch.float32, fast=False, counter_id=numbers
    )
    copied = row.clone(memory_format=torch.contiguous_format).reshape(-1).view(1, 32)
    again = scaled_mm(
        copied, column.scale, weight.values, weight.scale, *names, torch.float32, fast=False, counter_id=numbers
    )
    torch.testing.assert_close(out, again, rtol=0, atol=0)


def quantized_linear(x: Tensor, weight: Tensor, scalings: tuple[Scaling, Scaling], counter_id: int) -> Tensor:
    first = quantize(x, format=Format.E4M3, scaling=scalings[0])
    second = quantize(weight, format=Format.E4M3, scaling=scalings[1])
    return scaled_mm(
        first.values,
        first.scale,
        second.values,
        second.scale,
        scalings[0].value,
        scalings[1].value,
        torch.bfloat16,
        fast=False,
        counter_id=counter_id,
    )


@pytest.mark.parametrize("scalings", PAIRS, ids=lambda pair: f"{pair[0].value}-{pair[1].value}")
def test_compiled_for_any_batch_agrees_with_eager_and_counts(scalings, numbers: int) -> None:
    compiled = torch.compile(quantized_linear, fullgraph=True, dynamic=True)
    weight = torch.randn(24, 479, device="cuda")
    for i, rows in enumerate((17, 3, 4093), start=1):
        x = torch.randn(rows, 479, device="cuda")
        eager = quantized_linear(x, weight, scalings, numbers)
        actual = compiled(x, weight, scalings, numbers)
        # a quotient next to a tie may round the other way: the compiler's division is not correctly rounded
        assert (actual.double() - eager.double()).norm() <= 5e-3 * eager.double().norm()
        assert call_counters.count(numbers) == 2 * i


@pytest.mark.parametrize("scalings", PAIRS, ids=lambda pair: f"{pair[0].value}-{pair[1].value}")
def test_a_captured_graph_replays_on_new_values(scalings, numbers: int) -> None:
    x, weight = torch.randn(130, 479, device="cuda"), torch.randn(24, 479, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        quantized_linear(x, weight, scalings, numbers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = quantized_linear(x, weight, scalings, numbers)
    assert call_counters.count(numbers) == 2
    x.copy_(torch.randn(130, 479, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, quantized_linear(x, weight, scalings, numbers), rtol=0, atol=0)


@pytest.mark.parametrize("scalings", PAIRS, ids=lambda pair: f"{pair[0].value}-{pair[1].value}")
def test_a_call_does_not_wait_for_the_gpu(scalings, numbers: int) -> None:
    x, weight = torch.randn(130, 479, device="cuda"), torch.randn(24, 479, device="cuda")
    quantized_linear(x, weight, scalings, numbers)
    torch.cuda.set_sync_debug_mode("error")
    try:
        quantized_linear(x, weight, scalings, numbers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert call_counters.count(numbers) == 2


@pytest.mark.parametrize("format", list(Format))
def test_rounding_on_the_gpu_is_that_of_the_cpu(format: Format) -> None:
    info = FORMATS[format]
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(info.dtype).float()
    finite = values[values.isfinite()].unique()
    ties = (finite[1:] + finite[:-1]) / 2
    x = torch.cat([every.float(), ties, torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties * 0)])
    x = x[x.abs() <= info.max]  # beyond, the quantizers clamp
    expected, actual = x.to(info.dtype), x.cuda().to(info.dtype).cpu()
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("format", list(Format))
@pytest.mark.parametrize("scaling", sorted(set(Scaling) - PROBED))
@pytest.mark.parametrize("compiled", [False, True])
def test_quantizers_on_the_gpu_give_the_bits_of_the_cpu(format: Format, scaling: Scaling, compiled: bool) -> None:
    """Power-of-two scales, so that the division is exact and only rounding and extremes are compared."""

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        quantized = quantize(x, format=format, scaling=scaling, power_of_two=True)
        return quantized.values, quantized.scale

    torch.compiler.reset()  # of each case is a compilation of its own
    x = torch.randn(257, 300, generator=torch.Generator().manual_seed(5)).bfloat16()
    x[0, 3], x[1, 0], x[2, :] = math.nan, math.inf, 0.0
    values, scale = (torch.compile(both, fullgraph=True) if compiled else both)(x.cuda())
    expected_values, expected_scale = both(x)
    assert torch.equal(scale.cpu(), expected_scale)
    nan = expected_values.float().isnan()
    assert torch.equal(values.cpu().float().isnan(), nan)
    assert torch.equal(values.cpu().view(torch.uint8)[~nan], expected_values.view(torch.uint8)[~nan])


@pytest.mark.parametrize("swizzled", [False, True])
def test_mxfp8_scales_are_laid_out_as_on_the_cpu(swizzled: bool) -> None:
    x = torch.randn(300, 479, generator=torch.Generator().manual_seed(5)).bfloat16()
    first, second = (
        scaled_mm_operands.first_scale(
            quantize(on, format=Format.E4M3, scaling=Scaling.BLOCKWISE_1X32, power_of_two=True).scale,
            Scaling.BLOCKWISE_1X32,
            320,
            swizzled,
        )
        for on in (x.cuda(), x)
    )
    assert torch.equal(first.view(torch.uint8).cpu(), second.view(torch.uint8))


@pytest.mark.parametrize("scalings", PAIRS, ids=lambda pair: f"{pair[0].value}-{pair[1].value}")
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bias_is_what_a_separate_addition_gives(
    dtype, fast, scalings, make_recipe, make_product, numbers: int
) -> None:
    """Whether the kernel takes it or not; sizes with and without padding, a bias in the result's dtype and another."""
    accumulation = Accumulation.FAST if fast else Accumulation.PRECISE
    refused = refusal(E4M3, scalings, accumulation, m=16, k=128, n=32)
    if refused is not None:
        pytest.skip(f"not on this device: {refused}")
    for rows, columns, contraction in ((8192, 512, 1024), (17, 24, 479), (1, 1, 13), (3, 24, 0)):
        product = make_product(make_recipe(E4M3, scalings), rows, columns, contraction, "cuda")
        operands = (product.a, product.scale_a, product.b, product.scale_b, *(scaling.value for scaling in scalings))
        exact = scaled_mm(*operands, torch.float32, fast, numbers)
        for kind in (torch.bfloat16, torch.float32):
            size = exact.abs().amax() if contraction else 1.0
            bias = (torch.randn(columns, device="cuda") * size).to(kind)
            found = scaled_mm(*operands, dtype, fast, numbers, bias)
            expected = exact.double() + bias.double()
            step = 2.0**-7 if dtype is torch.bfloat16 else 2.0**-20
            noise = 1e-3 * product.magnitude  # another dtype of the result may mean another kernel
            assert found.dtype == dtype
            assert ((found.double() - expected).abs() <= step * (exact.abs() + bias.abs()) + noise).all()
