"""FBGEMM's and MSLK's GEMM without a GPU: what it refuses, its reference, and what its library is called with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loka.errors import InputError
from loka.kernels import call_counters
from loka.kernels.gemm import cutlass_rowwise, fbgemm, mslk
from loka.kernels.gemm.catalogue import GemmRequest
from loka.kernels.gemm.cutlass_rowwise import CutlassRowwise
from loka.numerics.enums import Accumulation, Format, Gemm, Range, Scaling
from loka.numerics.recipe import OperandRecipe

E4M3, E5M2 = OperandRecipe(), OperandRecipe(format=Format.E5M2)
KERNELS = pytest.mark.parametrize("kernel", [fbgemm.ROWWISE, mslk.ROWWISE], ids=lambda kernel: kernel.name)


def ask(kernel: CutlassRowwise, operands, gemm=Gemm.FPROP, padding=True, sizes=(4096, 512, 256), **more) -> str | None:
    return kernel.unsupported_reason(
        GemmRequest(gemm, operands, Accumulation.FAST, padding, *sizes, **{"target": "h100", **more})
    )


@KERNELS
@pytest.mark.parametrize("target", ["h100", "h200", "reference"])
def test_rowwise_in_e4m3(kernel: CutlassRowwise, target: str) -> None:
    assert ask(kernel, (E4M3, E4M3), target=target) is None
    for operands, formats in (((E4M3, E5M2), "e4m3 x e5m2"), ((E5M2, E4M3), "e5m2 x e4m3")):
        assert ask(kernel, operands, target=target) == (
            f"{kernel.library.name} multiplies e4m3 x e4m3, not {formats}; make both e4m3"
        )
    tensorwise = OperandRecipe(scaling=Scaling.TENSORWISE)
    assert ask(kernel, (tensorwise, tensorwise), target=target) == (
        f"{kernel.library.name} multiplies rowwise x rowwise, not tensorwise x tensorwise"
    )


def test_a_plan_needs_no_library_and_no_gpu() -> None:
    assert fbgemm.ROWWISE.unavailable_reason() is not None
    assert ask(fbgemm.ROWWISE, (E4M3, E4M3)) is None


def test_sizes_must_fit_where_padding_is_off() -> None:
    assert ask(fbgemm.ROWWISE, (E4M3, E4M3), padding=False, sizes=(4093, 512, 24)) is None
    assert ask(fbgemm.ROWWISE, (E4M3, E4M3), padding=False, sizes=(4096, 479, 12)) == (
        "N = 12 is no multiple of 8, K = 479 is no multiple of 16, and padding is off; set padding: true"
    )
    assert ask(fbgemm.ROWWISE, (E4M3, E4M3), Gemm.WGRAD, padding=False, sizes=(4093, 12, 1)) == (
        "K = 12 is no multiple of 8, M = 4093 is no multiple of 16, and padding is off; set padding: true"
    )
    assert ask(fbgemm.ROWWISE, (E4M3, E4M3), padding=False, sizes=(3, 13, 1), target="reference") is None


def test_what_a_float32_model_would_lose_is_said() -> None:
    reason = ask(fbgemm.ROWWISE, (E4M3, E4M3), dtype="float32")
    assert reason == "FBGEMM GenAI writes bfloat16, and the model computes in float32"


def test_a_static_scale_needs_a_maximum() -> None:
    static = OperandRecipe(range=Range.STATIC)
    assert "fprop.weight has a static scale but no amax" in str(ask(fbgemm.ROWWISE, (E4M3, static)))


@KERNELS
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_writes_bfloat16_and_counts_for_its_kernel(
    kernel: CutlassRowwise, bias: bool, dtype: torch.dtype, make_recipe, make_product, numbers: int
) -> None:
    product = make_product(make_recipe((Format.E4M3, Format.E4M3), (Scaling.ROWWISE, Scaling.ROWWISE)), 5, 7, 40)
    operator = getattr(torch.ops.loka, kernel.operator.partition("::")[2]).default
    operands = (product.a, product.scale_a, product.b, product.scale_b)
    added = torch.randn(7) if bias else None
    out = operator(*operands, "rowwise", "rowwise", dtype, False, numbers, added)
    expected = product.exact if added is None else product.exact + added.double()
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected.float().bfloat16().float(), rtol=2**-7, atol=0)
    assert torch.equal(out.float(), out.bfloat16().float())
    assert call_counters.counts(numbers) == {kernel.name: 1}


def test_shapes_are_checked_on_the_reference_too(numbers: int) -> None:
    operator = torch.ops.loka.fbgemm_rowwise_mm.default
    a, b = (torch.zeros(rows, 16, dtype=torch.float8_e4m3fn) for rows in (3, 5))
    scales = torch.ones(3, 1), torch.ones(5, 1)
    with pytest.raises(InputError, match=r"loka::fbgemm_rowwise_mm: the bias is \(4,\) and b has 5 rows"):
        operator(a, scales[0], b, scales[1], "rowwise", "rowwise", torch.float32, False, numbers, torch.zeros(4))


def library_of(seen: list[tuple[Tensor, ...]]):
    """A stand-in for the library's operator: the product in bfloat16, and what it was called with."""

    def rowwise(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, fast: bool) -> Tensor:
        seen.append((a, b, scale_a, scale_b))
        assert fast
        assert a.is_contiguous()
        assert b.is_contiguous()
        assert a.stride() == (a.shape[1], 1)
        assert scale_a.shape == a.shape[:1]
        assert scale_b.shape == b.shape[:1]
        assert a.shape[1] % 16 == 0
        assert b.shape[0] % 8 == 0
        y = (a.float() * scale_a[:, None]) @ (b.float() * scale_b[:, None]).t()
        return (y if bias is None else y + bias.float()).bfloat16()

    return rowwise


@pytest.mark.parametrize("bias", [None, torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("sizes", [(1, 8, 16), (5, 7, 40), (17, 24, 48)])
def test_the_library_gets_what_it_takes_and_the_result_is_cut(sizes, bias, make_recipe, make_product) -> None:
    product = make_product(make_recipe((Format.E4M3, Format.E4M3), (Scaling.ROWWISE, Scaling.ROWWISE)), *sizes)
    added = None if bias is None else torch.randn(sizes[1]).to(bias)
    seen: list[tuple[Tensor, ...]] = []
    out = cutlass_rowwise._launch(
        library_of(seen), product.a, product.scale_a, product.b, product.scale_b, torch.float32, True, added
    )
    expected = product.exact if added is None else product.exact + added.double()
    assert out.shape == sizes[:2]
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected.float(), rtol=2**-6, atol=2**-7)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"a": torch.zeros(3, 16)}, "operand a is torch.float32, not FP8"),
        ({"scaling_a": "tensorwise"}, "multiplies rowwise x rowwise, not tensorwise x rowwise"),
        ({"b": torch.zeros(5, 16).to(torch.float8_e5m2)}, "multiplies e4m3 x e4m3, not e4m3 x e5m2"),
        ({"a": torch.zeros(3, 16).to(torch.float8_e5m2)}, "multiplies e4m3 x e4m3, not e5m2 x e4m3"),
        ({}, "FBGEMM GenAI is not installed: pip install 'loka\\[fbgemm\\]'"),
    ],
)
def test_on_a_gpu_what_cannot_run_is_an_error_and_never_the_reference(
    change, reason: str, monkeypatch: pytest.MonkeyPatch, numbers: int
) -> None:
    """The function that runs on CUDA tensors, called with CPU ones."""
    monkeypatch.setattr(cutlass_rowwise, "has_fp8", lambda device: True)
    taken = []
    monkeypatch.setattr(cutlass_rowwise.gemm_operator, "define", lambda name, cpu, cuda: taken.append(cuda))
    cutlass_rowwise.define_operator(fbgemm.ROWWISE)
    operands = {
        "a": F.pad(torch.ones(3, 15), (0, 1)).to(torch.float8_e4m3fn),
        "scale_a": torch.ones(3, 1),
        "b": torch.ones(5, 16).to(torch.float8_e4m3fn),
        "scale_b": torch.ones(5, 1),
        "scaling_a": "rowwise",
        **change,
    }
    with pytest.raises(InputError, match=reason):
        taken[0](*operands.values(), "rowwise", torch.bfloat16, False, numbers)
    assert call_counters.count(numbers) == 0
