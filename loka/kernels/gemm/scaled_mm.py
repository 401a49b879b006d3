"""torch's FP8 GEMM (cuBLASLt or CUTLASS on Hopper) as a function and as the operator `loka::scaled_mm`.

With tensorwise or rowwise scales and a result in bfloat16 (tensorwise also in float32 or float16), a plain eager
`scaled_mm` calls `torch._scaled_mm`, which costs the host less, and torch.compile sees that call. Everything else is
the operator, whose signature is in `gemm_operator`.

On the CPU, and on a GPU without FP8 tensor cores (compute capability below 8.9), the reference runs: dequantize,
multiply in float32. It takes every pair of recipes. On other GPUs `torch.nn.functional.scaled_mm` runs, within
`scaled_mm_operands`; anything else is an error, never the reference. Where the GPU's kernel takes the bias (tensorwise
and rowwise, all in bfloat16), the bias is added before the result is rounded, as in the reference; otherwise after.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from loka.devices.spec import ALIGNMENT
from loka.devices.targets import DEFAULT
from loka.errors import InputError
from loka.kernels import call_counters
from loka.kernels.fused.operators import runs_directly
from loka.kernels.gemm import gemm_operator, scaled_mm_operands
from loka.kernels.gemm.library import has_fp8
from loka.numerics.enums import Accumulation, Format, Scaling
from loka.numerics.quantize import FORMATS

KERNEL = "torch.scaled_mm"  # its name in the catalogue

_FORMAT_OF = {info.dtype: format for format, info in FORMATS.items()}
_NATIVE_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
_SCALING_TYPE = {
    Scaling.TENSORWISE: ScalingType.TensorWise,
    Scaling.ROWWISE: ScalingType.RowWise,
    Scaling.BLOCKWISE_1X128: ScalingType.BlockWise1x128,
    Scaling.BLOCKWISE_128X128: ScalingType.BlockWise128x128,
    Scaling.BLOCKWISE_1X32: ScalingType.BlockWise1x32,
}

_reference = gemm_operator.reference("loka::scaled_mm", KERNEL)


def _cuda(
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
        return _reference(a, scale_a, b, scale_b, scaling_a, scaling_b, dtype, fast, counter_id, bias)
    refusal = _refusal(scaling_a, scaling_b, a.dtype, b.dtype, fast, a.device.index)
    if refusal is not None:
        raise InputError(
            f"loka::scaled_mm on this GPU: {refusal}, or run a package generated for it (target: {DEFAULT.name})"
        )
    call_counters.increment(counter_id, KERNEL)
    rows, columns = a.shape[0], b.shape[0]
    if bias is not None:
        gemm_operator.check_bias("loka::scaled_mm", bias, b)
    if a.numel() == 0 or columns == 0:
        return gemm_operator.empty_product(a, b, dtype, bias)
    first, second = Scaling(scaling_a), Scaling(scaling_b)
    limits = scaled_mm_operands.limits_of(a.device.index)
    multiple = limits.multiple(first)
    a = scaled_mm_operands.pad_operand(a, limits.row_multiple(first), multiple)
    b = scaled_mm_operands.pad_operand(b, multiple, multiple)
    fused = bias if bias is not None and _takes_bias(first, second, dtype, bias.dtype) else None
    native = dtype if dtype in _NATIVE_DTYPES else torch.float32
    swizzle = None
    if first is Scaling.BLOCKWISE_1X32:
        swizzle = SwizzleType.SWIZZLE_32_4_4 if limits.swizzled else SwizzleType.NO_SWIZZLE
    out = F.scaled_mm(
        a,
        b.t(),
        scaled_mm_operands.first_scale(scale_a, first, a.shape[0], limits.swizzled),
        _SCALING_TYPE[first],
        scaled_mm_operands.second_scale(scale_b, second, b.shape[0], limits.swizzled),
        _SCALING_TYPE[second],
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=torch.bfloat16 if first in limits.rounded else native,
        use_fast_accum=fast,
        bias=None if fused is None else scaled_mm_operands.pad_vector(fused, b.shape[0]),
    )
    if out.shape != (rows, columns):
        out = out[:rows, :columns].contiguous()
    return out.to(dtype) if bias is None or fused is not None else (out + bias).to(dtype)


def _takes_bias(first: Scaling, second: Scaling, dtype: torch.dtype, bias: torch.dtype) -> bool:
    """True if the GPU's kernel adds the bias."""
    scalings = {first, second} <= {Scaling.TENSORWISE, Scaling.ROWWISE}
    return scalings and dtype == bias == torch.bfloat16


@cache
def _refusal(
    scaling_a: str, scaling_b: str, dtype_a: torch.dtype, dtype_b: torch.dtype, fast: bool, device: int
) -> str | None:
    formats: list[Format] = []
    for name, dtype in (("a", dtype_a), ("b", dtype_b)):
        if dtype not in _FORMAT_OF:
            return f"operand {name} is {dtype}, not FP8; quantize it first"
        formats.append(_FORMAT_OF[dtype])
    accumulation = Accumulation.FAST if fast else Accumulation.PRECISE
    return scaled_mm_operands.refuse_recipe(
        (Scaling(scaling_a), Scaling(scaling_b)),
        (formats[0], formats[1]),
        accumulation,
        scaled_mm_operands.limits_of(device),
    )


@cache
def _takes_recipe(
    scaling_a: str, scaling_b: str, dtype_a: torch.dtype, dtype_b: torch.dtype, fast: bool, device: int
) -> bool:
    scalings = {Scaling(scaling_a), Scaling(scaling_b)}
    return (
        scalings <= {Scaling.TENSORWISE, Scaling.ROWWISE}
        and len(scalings) == 1
        and has_fp8(device)
        and _refusal(scaling_a, scaling_b, dtype_a, dtype_b, fast, device) is None
        and scaled_mm_operands.limits_of(device).row_multiple(scaling_a) == 1
    )


def taken_as_is(
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
) -> bool:
    """True if torch._scaled_mm takes the operands, of any number of rows, on their GPU, other sizes padded.

    Tensorwise it writes float32 and float16, too: gradients of weights are float32 under autocast.
    """
    tensorwise = scaling_a == scaling_b == Scaling.TENSORWISE
    if bias is not None and (bias.dtype != torch.bfloat16 or a.shape[1] == 0):
        return False  # of an empty sum, torch forgets the bias
    return (
        (dtype == torch.bfloat16 or (tensorwise and dtype in _NATIVE_DTYPES and bias is None))
        and a.shape[0] > 1  # of a single row, torch and cuBLASLt may read another stride
        and _takes_recipe(scaling_a, scaling_b, a.dtype, b.dtype, fast, a.device.index)
    )


def _direct(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    scaling_b: str,
    dtype: torch.dtype,
    fast: bool,
    bias: Tensor | None,
) -> Tensor:
    """The product by torch._scaled_mm, with the contraction and the columns padded to multiples of 16 if need be."""
    columns = b.shape[0]
    if a.shape[1] % ALIGNMENT:
        a = scaled_mm_operands.pad_operand(a, 1, ALIGNMENT)
        b = scaled_mm_operands.pad_operand(b, 1, ALIGNMENT)
    if columns % ALIGNMENT:
        b = scaled_mm_operands.pad_operand(b, ALIGNMENT, 1)
        scale_b = scaled_mm_operands.second_scale(scale_b, Scaling(scaling_b), b.shape[0]).t()
        bias = None if bias is None else scaled_mm_operands.pad_vector(bias, b.shape[0])
    out = torch._scaled_mm(a, b.t(), scale_a, scale_b.t(), bias=bias, out_dtype=dtype, use_fast_accum=fast)
    return out[:, :columns].contiguous() if columns % ALIGNMENT else out


def traced(
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
    """The calls that AOTAutograd traces: torch's GEMM, then the count of its run."""
    product = _direct(a, scale_a, b, scale_b, scaling_b, dtype, fast, bias)
    call_counters.increment_after(product, counter_id, KERNEL)
    return product


_operator = gemm_operator.define("scaled_mm", _reference, _cuda)
gemm_operator.decompose("scaled_mm", traced, taken_as_is)


def scaled_mm(
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
    """The product. a: FP8 (R, C); b: FP8 (S, C); scales: float32, two-dimensional; result: (R, S) of `dtype`.

    A bias (S,) is added to each row of the result.

    `scaling_a` and `scaling_b` are values of `Scaling`; `counter_id` is the counter of the call. Raises InputError
    where shapes do not fit, or where the GPU has no kernel for the recipe.
    """
    if (
        a.is_cuda
        and runs_directly()
        and taken_as_is(a, scale_a, b, scale_b, scaling_a, scaling_b, dtype, fast, counter_id, bias)
    ):
        call_counters.increment(counter_id, KERNEL)
        return _direct(a, scale_a, b, scale_b, scaling_b, dtype, fast, bias)
    out: Tensor = _operator(a, scale_a, b, scale_b, scaling_a, scaling_b, dtype, fast, counter_id, bias)
    return out
