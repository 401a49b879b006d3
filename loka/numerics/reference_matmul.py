"""The reference of a scaled matrix product: dequantize both operands, multiply in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from loka.errors import InputError
from loka.numerics.quantize import Quantized, dequantize


def reference_scaled_mm(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`(a * scale_a) @ (b * scale_b).T`: FP8 a of (R, C) and b of (S, C) give (R, S) in `out_dtype`.

    Scales are float32 and two-dimensional, of any granularity (`quantize.scale_shape`). Sizes may be zero; a
    contraction of length zero gives zeros. Raises InputError where shapes do not fit.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise InputError(
            f"scaled_mm: a is {tuple(a.shape)} and b is {tuple(b.shape)}; both must be matrices with as many columns"
        )
    left = dequantize(Quantized(a, scale_a))
    right = dequantize(Quantized(b, scale_b))
    with torch.autocast(a.device.type, enabled=False):  # or it would multiply in autocast's dtype, not in float32
        return torch.matmul(left, right.t()).to(out_dtype)
