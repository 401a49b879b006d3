"""The bias of loka::scaled_mm: its reference, its shapes, its counting."""

from __future__ import annotations

import pytest
import torch

from loka.errors import InputError
from loka.kernels import call_counters
from loka.kernels.gemm import scaled_mm as gemm
from loka.kernels.gemm.scaled_mm import scaled_mm
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import Quantized, dequantize, quantize

NAMES = ("rowwise", "rowwise")


def operands(rows: int = 5, columns: int = 24, contraction: int = 48) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for size in (rows, columns):
        matrix = torch.randn(size, contraction, generator=generator)
        quantized = quantize(matrix, format=Format.E4M3, scaling=Scaling.ROWWISE)
        made += [quantized.values, quantized.scale]
    return made


def test_the_bias_is_added_before_the_result_is_rounded(numbers: int) -> None:
    a, scale_a, b, scale_b = operands()
    bias = torch.randn(24, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = scaled_mm(a, scale_a, b, scale_b, *NAMES, torch.bfloat16, False, numbers, bias)
    left = dequantize(Quantized(a, scale_a)).double()
    exact = left @ dequantize(Quantized(b, scale_b)).double().t() + bias.double()
    assert ((out.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6).all()  # half a step of bfloat16: one rounding
    assert call_counters.count(numbers) == 1


def test_without_rows_or_contraction(numbers: int) -> None:
    for rows, contraction in ((0, 48), (3, 0)):
        a, scale_a, b, scale_b = operands(rows, 24, contraction)
        bias = torch.arange(24.0)
        out = scaled_mm(a, scale_a, b, scale_b, *NAMES, torch.float32, False, numbers, bias)
        assert torch.equal(out, bias.expand(rows, 24))


def test_a_bias_of_another_size_is_refused(numbers: int) -> None:
    a, scale_a, b, scale_b = operands()
    with pytest.raises(InputError, match=r"the bias is \(5,\) and b has 24 rows"):
        scaled_mm(a, scale_a, b, scale_b, *NAMES, torch.float32, False, numbers, torch.ones(5))
    meta = [tensor.to("meta") for tensor in (a, scale_a, b, scale_b)]
    with pytest.raises(RuntimeError, match=r"the bias is \(5,\) and b has 24 rows"):
        scaled_mm(*meta, *NAMES, torch.float32, False, numbers, torch.ones(5, device="meta"))
    assert scaled_mm(*meta, *NAMES, torch.float32, False, numbers, torch.ones(24, device="meta")).shape == (5, 24)


def test_compiled_for_any_batch(numbers: int) -> None:
    def run(a: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return scaled_mm(a, scale, b, scale_b, *NAMES, torch.float32, False, numbers, bias).sin()

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 9):
        a, scale_a, b, scale_b = operands(rows)
        bias = torch.ones(24)
        torch.testing.assert_close(compiled(a, scale_a, bias), run(a, scale_a, bias))


def test_torch_is_not_called_directly_for_a_bias_that_it_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an empty sum; nor for a bias in another dtype than the result's."""
    monkeypatch.setattr(gemm, "_takes_recipe", lambda *recipe: True)
    bias = torch.ones(24, dtype=torch.bfloat16)

    def direct(contraction: int, bias: torch.Tensor | None) -> bool:
        return gemm.taken_as_is(*operands(3, 24, contraction), *NAMES, torch.bfloat16, False, 0, bias)

    assert direct(48, bias)
    assert direct(48, None)
    assert direct(0, None)
    assert not direct(0, bias)
    assert not direct(48, bias.float())
