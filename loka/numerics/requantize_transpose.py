"""The reference of requantize_transpose: the transposed copy of a quantized matrix, made from its FP8 values alone.

A matrix of (R, C) quantized rowwise serves a GEMM that contracts over C. The GEMM that contracts over R needs it
transposed, with a scale per row of the transpose, which a pass along the rows cannot compute. A single scale is
available once the rows are quantized: the largest row scale, S. Where all scales are powers of two, row scale / S is a
power of two of at most 1, so that

    transposed[c, r] = values[r, c] * (scale[r] / S)

is exact except for values that become subnormal: these are rounded to nearest, ties to even, or to zero. They are small
compared with S.
"""

from __future__ import annotations

import torch

from loka.errors import InputError
from loka.numerics.enums import Scaling
from loka.numerics.formats import FORMATS, decode
from loka.numerics.quantize import Quantized, round_up_to_power_of_two, scale_shape, static_scale

_FORMAT_OF = {info.dtype: format for format, info in FORMATS.items()}


def requantize_transpose(quantized: Quantized, *, check: bool = False) -> Quantized:
    """Values (R, C) in e4m3 or e5m2 with scales (R, 1) become values (C, R), contiguous, with scales (C, 1), all S.

    S is the largest row scale; for a matrix without rows, the scale of an all-zero matrix. NaN stays NaN, zeros keep
    their sign. With `check`, scales that are not positive normal powers of two are rejected; this synchronises with the
    GPU, so by default the caller must ensure it. Raises InputError for values that are not FP8 and for scales of
    another shape.
    """
    values, scale = quantized.values, quantized.scale
    if values.dim() != 2 or values.dtype not in _FORMAT_OF:
        raise InputError(
            f"requantize_transpose: an FP8 matrix is needed, got {values.dtype} of shape {tuple(values.shape)}"
        )
    rows, columns = values.shape
    if tuple(scale.shape) != scale_shape(rows, columns, Scaling.ROWWISE):
        raise InputError(
            f"requantize_transpose: scales of shape {tuple(scale.shape)} for a matrix of {(rows, columns)}; it takes "
            "rowwise scales, "
            f"of shape {(rows, 1)}"
        )
    if check and not _are_powers_of_two(scale):
        raise InputError("requantize_transpose: a scale is no power of two; quantize with power_of_two=True")
    if rows == 0:
        largest = scale.new_full((), static_scale(0.0, _FORMAT_OF[values.dtype], power_of_two=True))
    else:
        largest = scale.amax()
    transposed = (decode(values) * (scale / largest)).to(values.dtype).t().contiguous()
    return Quantized(values=transposed, scale=largest.expand(columns, 1).contiguous())


def _are_powers_of_two(scale: torch.Tensor) -> bool:
    normal = scale.isfinite() & (scale >= torch.finfo(torch.float32).smallest_normal)
    return bool((normal & (round_up_to_power_of_two(scale.float()) == scale)).all())
