"""The FP8 GEMM with rowwise scales of FBGEMM GenAI and its successor MSLK: CUTLASS kernels for Hopper.

    f8f8bf16_rowwise(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, Tensor? bias, bool use_fast_accum) -> Tensor

XQ (M, K) and WQ (N, K) are contiguous and e4m3: FBGEMM 1.6 rejects an XQ of e5m2, although its kernels were written for
it. x_scale (M,) and w_scale (N,) are float32; the bias is (N,) in bfloat16 or float32; the result is bfloat16. K must
be a multiple of 16 and N of 8: 16 bytes of each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from loka.devices.targets import spec_of
from loka.errors import InputError
from loka.kernels import call_counters
from loka.kernels.gemm import gemm_operator, scaled_mm_operands
from loka.kernels.gemm.gemm_kernel import BFLOAT16, GemmRequest, GemmSizes
from loka.kernels.gemm.library import Library, has_fp8, loaded_operator
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import FORMATS

CAPABILITY = (9, 0)
WRITTEN = torch.bfloat16
MULTIPLES = GemmSizes(rows=1, columns=8, contraction=16)

_FORMATS = {FORMATS[format].dtype: format for format in (Format.E4M3, Format.E5M2)}
_BIASES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class CutlassRowwise:
    """One library's kernel of this signature. `define_operator` registers its operator."""

    name: str  # "fbgemm.rowwise"
    operator: str  # "loka::fbgemm_rowwise_mm"
    library: Library

    def unsupported_reason(self, wanted: GemmRequest) -> str | None:
        """Rowwise scales, e4m3, and bfloat16 results are supported; the reference takes every size."""
        device = spec_of(wanted.target)
        refusal = wanted.refuse_range() or _refuse_recipe(wanted.scalings, wanted.formats, self.library.name)
        if refusal is None and wanted.dtype != BFLOAT16:
            refusal = f"{self.library.name} writes bfloat16, and the model computes in {wanted.dtype}"
        if refusal is None and device.capability != CAPABILITY:
            refusal = f"{self.library.name} was never tried on {device.title}"
        return refusal or (None if device.is_reference else wanted.refuse_sizes(MULTIPLES))

    def unavailable_reason(self) -> str | None:
        """The kernel needs its library and a Hopper GPU."""
        return self.library.unavailable_reason()


def define_operator(kernel: CutlassRowwise) -> torch._ops.OpOverload:
    """Register the kernel's operator (its signature is in `gemm_operator`).

    Results are rounded to bfloat16 and then converted, also by the reference, which runs on the CPU and on a GPU
    without FP8 tensor cores. On other GPUs the operator raises InputError for unsupported operands and for a missing
    library.
    """
    reference = gemm_operator.reference(kernel.operator, kernel.name, WRITTEN)

    def cuda(
        a: Tensor,
        scale_a: Tensor,
        b: Tensor,
        scale_b: Tensor,
        scaling_a: str,
        scaling_b: str,
        dtype: torch.dtype,
        fast: bool,
        counter_id: int,
        bias: Tensor | None = None,
    ) -> Tensor:
        if not has_fp8(a.device.index):
            return reference(a, scale_a, b, scale_b, scaling_a, scaling_b, dtype, fast, counter_id, bias)
        refusal = _refuse_operands(scaling_a, scaling_b, a.dtype, b.dtype, kernel.library.name)
        if refusal is not None:
            raise InputError(f"{kernel.operator}: {refusal}")
        if bias is not None:
            gemm_operator.check_bias(kernel.operator, bias, b)
        launch = loaded_operator(kernel.library)
        call_counters.increment(counter_id, kernel.name)
        if a.numel() == 0 or b.shape[0] == 0:
            return gemm_operator.empty_product(a, b, dtype, bias)
        return _launch(launch, a, scale_a, b, scale_b, dtype, fast, bias)

    return gemm_operator.define(kernel.operator.partition("::")[2], reference, cuda)


def _launch(
    launch: torch._ops.OpOverload,
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    fast: bool,
    bias: Tensor | None,
) -> Tensor:
    """Run the kernel with zero padding to supported sizes, and slice the result."""
    rows, columns = a.shape[0], b.shape[0]
    a = scaled_mm_operands.pad_operand(a, MULTIPLES.rows, MULTIPLES.contraction)
    b = scaled_mm_operands.pad_operand(b, MULTIPLES.columns, MULTIPLES.contraction)
    scale_b = scaled_mm_operands.pad_vector(scale_b.reshape(-1), b.shape[0])
    fused = None if bias is None or bias.dtype not in _BIASES else scaled_mm_operands.pad_vector(bias, b.shape[0])
    out: Tensor = launch(a, b, scale_a.reshape(-1).contiguous(), scale_b, fused, fast)
    if out.shape != (rows, columns):
        out = out[:rows, :columns].contiguous()
    return out.to(dtype) if bias is None or fused is not None else (out + bias).to(dtype)


@cache
def _refuse_operands(
    scaling_a: str, scaling_b: str, dtype_a: torch.dtype, dtype_b: torch.dtype, library: str
) -> str | None:
    for name, dtype in (("a", dtype_a), ("b", dtype_b)):
        if dtype not in _FORMATS:
            return f"operand {name} is {dtype}, not FP8; quantize it first"
    return _refuse_recipe((scaling_a, scaling_b), (_FORMATS[dtype_a], _FORMATS[dtype_b]), library)


def _refuse_recipe(scalings: tuple[str, str], formats: tuple[Format, Format], library: str) -> str | None:
    if scalings != (Scaling.ROWWISE, Scaling.ROWWISE):
        return f"{library} multiplies rowwise x rowwise, not {scalings[0]} x {scalings[1]}"
    if formats != (Format.E4M3, Format.E4M3):
        return f"{library} multiplies e4m3 x e4m3, not {formats[0].value} x {formats[1].value}; make both e4m3"
    return None
