"""The operator on the CPU: every pair of recipes and odd sizes against float64, tracing, counting, extremes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from loka.errors import InputError
from loka.kernels import call_counters
from loka.kernels.gemm.scaled_mm import scaled_mm
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import quantize

SCALING_PAIRS = list(itertools.product(Scaling, Scaling))
FORMAT_PAIRS = list(itertools.product(Format, Format))
SIZES = list(itertools.product((1, 3, 17), (1, 24), (13, 479)))
ROWWISE = (Scaling.ROWWISE, Scaling.ROWWISE)
E4M3 = (Format.E4M3, Format.E4M3)


@pytest.mark.parametrize("scalings", SCALING_PAIRS, ids=lambda pair: f"{pair[0].value}-{pair[1].value}")
@pytest.mark.parametrize("formats", FORMAT_PAIRS, ids=lambda pair: f"{pair[0].value}-{pair[1].value}")
def test_every_pair_of_recipes_at_odd_sizes(formats, scalings, make_recipe, make_product, numbers: int) -> None:
    for power_of_two in (False, True):
        recipe = make_recipe(formats, scalings, power_of_two)
        for rows, columns, contraction in SIZES:
            product = make_product(recipe, rows, columns, contraction)
            out = product.run(counter_id=numbers)
            assert out.shape == (rows, columns)
            assert out.dtype is torch.float32
            assert out.is_contiguous()
            assert ((out.double() - product.exact).abs() <= 2e-6 * product.magnitude).all()
    assert call_counters.count(numbers) == 2 * len(SIZES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_result_has_the_dtype_that_was_asked_for(dtype, make_recipe, make_product, numbers: int) -> None:
    product = make_product(make_recipe(E4M3, ROWWISE), 5, 7, 33)
    out = product.run(dtype, counter_id=numbers)
    assert out.dtype is dtype
    torch.testing.assert_close(out, product.run(torch.float32, counter_id=numbers).to(dtype), rtol=0, atol=0)


def test_autocast_does_not_lower_the_reference(make_recipe, make_product, numbers: int) -> None:
    product = make_product(make_recipe(E4M3, ROWWISE), 8, 32, 64)
    expected = product.run(torch.float32, counter_id=numbers)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(product.run(torch.float32, counter_id=numbers), expected)


@pytest.mark.parametrize("scalings", zip(Scaling, Scaling, strict=True), ids=lambda pair: pair[0].value)
@pytest.mark.parametrize("sizes", [(0, 24, 13), (3, 0, 13), (3, 24, 0), (0, 0, 0)])
def test_empty_operands_give_zeros_of_the_right_shape(
    sizes, scalings, make_recipe, quantize_product, numbers: int
) -> None:
    rows, columns, contraction = sizes
    a, b = torch.ones(rows, contraction), torch.ones(columns, contraction)
    out = quantize_product(make_recipe(E4M3, scalings), a, b).run(counter_id=numbers)
    assert out.shape == (rows, columns)
    assert (out == 0).all()
    assert call_counters.count(numbers) == 1


@pytest.mark.parametrize("scalings", SCALING_PAIRS, ids=lambda pair: f"{pair[0].value}-{pair[1].value}")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_spoils_that_row_alone_and_a_zero_row_gives_zeros(
    bad: float, scalings, make_recipe, quantize_product, numbers: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(200, 130, generator=generator)
    b = torch.randn(140, 130, generator=generator)
    a[7, 3] = bad
    a[9] = 0.0
    b[11, 129] = bad
    b[13] = 0.0
    out = quantize_product(make_recipe(E4M3, scalings), a, b).run(counter_id=numbers)
    poisoned = torch.zeros(200, 140, dtype=torch.bool)
    poisoned[7] = True
    poisoned[:, 11] = True
    assert torch.equal(~out.isfinite(), poisoned)
    assert (out[9][~poisoned[9]] == 0).all()
    assert (out[:, 13][~poisoned[:, 13]] == 0).all()
    assert (out[0][~poisoned[0]] != 0).sum() == 138


def test_shapes_that_do_not_fit_are_refused(numbers: int) -> None:
    a, b = torch.zeros(2, 32).to(torch.float8_e4m3fn), torch.zeros(3, 16).to(torch.float8_e4m3fn)
    one = torch.ones(1, 1)
    with pytest.raises(InputError, match=r"a is \(2, 32\) and b is \(3, 16\)"):
        scaled_mm(a, one, b, one, "tensorwise", "tensorwise", torch.float32, fast=False, counter_id=numbers)
    with pytest.raises(InputError, match="does not fit a matrix"):
        scaled_mm(a, torch.ones(5, 1), a, one, "rowwise", "tensorwise", torch.float32, fast=False, counter_id=numbers)


@pytest.mark.slow
def test_the_fake_implementation_agrees_with_the_real_one(make_recipe, make_product, numbers: int) -> None:
    for recipe, dtype in [
        (make_recipe(E4M3, ROWWISE), torch.bfloat16),
        (make_recipe((Format.E5M2, Format.E5M2), (Scaling.BLOCKWISE_128X128, Scaling.TENSORWISE)), torch.float32),
    ]:
        product = make_product(recipe, 17, 24, 479)
        arguments = (product.a, product.scale_a, product.b, product.scale_b)
        names = [scaling.value for scaling in recipe.scalings]
        before = [x.clone() for x in arguments]
        # test_schema is left out: its check for mutation multiplies, which FP8 has not; the bytes are compared below
        checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(
            torch.ops.loka.scaled_mm.default, (*arguments, *names, dtype, False, numbers), test_utils=checks
        )
        for old, new in zip(before, arguments, strict=True):
            assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


def test_the_fake_implementation_does_not_count(numbers: int) -> None:
    a = torch.empty(3, 16, dtype=torch.float8_e4m3fn, device="meta")
    scale = torch.empty(1, 1, device="meta")
    out = scaled_mm(a, scale, a, scale, "tensorwise", "tensorwise", torch.bfloat16, fast=False, counter_id=numbers)
    assert out.shape == (3, 3)
    assert out.device.type == "meta"
    assert call_counters.count(numbers) == 0
    with pytest.raises(RuntimeError, match="a has 16 columns and b has 8"):
        scaled_mm(a, scale, a[:, :8], scale, "tensorwise", "tensorwise", torch.bfloat16, fast=False, counter_id=numbers)


class Linear(torch.autograd.Function):
    """y = x @ weight.T with all three GEMMs in FP8, as generated code writes it."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, counter_id: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counter_id = counter_id
        return product(x, weight, counter_id)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return product(grad, weight.t(), ctx.counter_id + 1), product(grad.t(), x.t(), ctx.counter_id + 2), None


def product(a: Tensor, b: Tensor, counter_id: int) -> Tensor:
    first, second = (quantize(x, format=Format.E4M3, scaling=Scaling.ROWWISE) for x in (a, b))
    return scaled_mm(
        first.values,
        first.scale,
        second.values,
        second.scale,
        "rowwise",
        "rowwise",
        a.dtype,
        fast=False,
        counter_id=counter_id,
    )


def step(x: Tensor, weight: Tensor, counter_id: int) -> Tensor:
    return Linear.apply(x, weight, counter_id).sin()


def gradients(function, x: Tensor, weight: Tensor, counter_id: int) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = function(x, weight, counter_id)
    out.sum().backward()
    return out.detach(), x.grad, weight.grad


@pytest.mark.slow
def test_forward_and_backward_count_in_eager_and_compiled_for_any_batch(numbers: int) -> None:
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(24, 40, generator=generator)
    for i, rows in enumerate((17, 3, 64), start=1):
        x = torch.randn(rows, 40, generator=generator)
        eager = gradients(step, x, weight, numbers)
        assert [call_counters.count(numbers + offset) for offset in range(3)] == [2 * i - 1] * 3
        traced = gradients(compiled, x, weight, numbers)
        assert [call_counters.count(numbers + offset) for offset in range(3)] == [2 * i] * 3
        for actual, expected in zip(traced, eager, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_two_sites_with_numbers_of_their_own_are_both_counted_when_compiled_together(numbers: int) -> None:
    """Equal calls that differ in nothing but the number must not be merged into one."""
    compiled = torch.compile(lambda x, w: product(x, w, numbers) + product(x, w, numbers + 1), fullgraph=True)
    x, weight = torch.randn(4, 32), torch.randn(8, 32)
    torch.testing.assert_close(compiled(x, weight), 2 * product(x, weight, numbers + 2), rtol=1e-4, atol=1e-4)
    assert [call_counters.count(numbers + offset) for offset in range(3)] == [1, 1, 1]
