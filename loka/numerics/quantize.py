"""The reference quantizers, which every generated quantizer and every fused kernel must match bit for bit.

The canonical sequence of operations, for a matrix x of (R, C), a format with largest finite value MAX, and blocks as
the scaling prescribes (the whole matrix, a row, 128 neighbours in a row, a square of 128 x 128; a block at the edge is
padded with zeros):

    x     = x.float()
    amax  = x.abs().nan_to_num(0.0, 0.0, 0.0).amax(block)     # over finite entries; 0 where there are none
    scale = amax.clamp(min=AMAX_FLOOR) / MAX
    scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)     # where power_of_two
    q     = torch.where(x.isfinite(), (x / scale).clamp(-MAX, MAX), torch.nan).to(fp8).contiguous()

where `x / scale` spreads each scale over its block. A value is then `q * scale`. The reasons:

- Non-finite entries are ignored in amax and become NaN: they spoil what they would spoil in the unquantized layer
  (their own row of a product), not everything that shares a scale with them. The test is on x, not on the quotient, so
  that a finite x that overflows the division saturates.
- The floor keeps the scale of a zero block positive and a normal number, and 1 / scale finite: no 0 / 0.
- Rounding up to a power of two works on the bits: adding all ones to the mantissa carries into the exponent unless the
  mantissa was zero, and clearing it rounds up. That is exact, which log2 and pow are not on every device. Scales are
  never subnormal, so the exponent field is enough.
- The maximum of a 128 x 128 square is taken along rows first and then over rows: torch 2.11 cannot compile both at once
  for symbolic sizes, and the order of maxima changes nothing.
- Division, not multiplication by a reciprocal: one rounding instead of two.
- With a static scale, amax is given beforehand and the clamp saturates what exceeds it.
- A matrix without elements has no amax (torch raises), so it is returned before the sequence starts, with the scales of
  an all-zero matrix.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.errors import InputError
from loka.numerics.enums import Format, Scaling
from loka.numerics.formats import FORMATS, decode
from loka.numerics.scalings import block_of

BLOCK = 128  # elements in a row that share a scale in blockwise_1x128
AMAX_FLOOR = 2.0**-100  # lower bound of amax; keeps a zero block's scale positive and normal


@dataclass(frozen=True, slots=True)
class Quantized:
    """An FP8 matrix (R, C), contiguous, and its float32 scales, two-dimensional; a value is `values * scale`."""

    values: Tensor
    scale: Tensor


def scale_shape(rows: int, columns: int, scaling: Scaling) -> tuple[int, int]:
    """Shape of the scales of a (rows, columns) matrix."""
    return block_of(scaling).count(rows, columns)


def static_scale(amax: float, format: Format, power_of_two: bool) -> float:
    """The static scale for a given maximum of |x|, rounded to float32 as in the quantizers.

    Raises InputError where amax is negative or not finite.
    """
    if not 0.0 <= amax <= torch.finfo(torch.float32).max:
        raise InputError(f"static scale: amax must be a finite number, zero or above, not {amax}")
    # float32 arithmetic, as the quantizers do it on tensors: amax, floor and maximum are float32 values
    (amax32,) = struct.unpack("f", struct.pack("f", amax))
    (scale,) = struct.unpack("f", struct.pack("f", max(amax32, AMAX_FLOOR) / FORMATS[format].max))
    if power_of_two:
        (bits,) = struct.unpack("i", struct.pack("f", scale))
        (scale,) = struct.unpack("f", struct.pack("i", (bits + 0x7FFFFF) & 0x7F800000))
    return float(scale)


def quantize(
    x: Tensor, *, format: Format, scaling: Scaling, power_of_two: bool = False, amax: float | None = None
) -> Quantized:
    """Quantize a matrix x of (R, C), any floating dtype, as the module's docstring describes.

    `amax` is the maximum of |x| of a static scale, which holds for the whole matrix whatever the scaling; None measures
    it. R and C may be zero. Raises InputError where x is not a matrix or amax is not usable.
    """
    if x.dim() != 2:
        raise InputError(f"quantize: a matrix is needed, got shape {tuple(x.shape)}; reshape to (rows, columns) first")
    x = x.detach().float()
    rows, columns = x.shape
    shape = scale_shape(rows, columns, scaling)
    if amax is not None:
        scale = x.new_full(shape, static_scale(amax, format, power_of_two))
    elif x.numel() == 0:
        scale = x.new_full(shape, static_scale(0.0, format, power_of_two))
    else:
        scale = _amax(x, scaling).clamp(min=AMAX_FLOOR) / FORMATS[format].max
        if power_of_two:
            scale = round_up_to_power_of_two(scale)
    limit = FORMATS[format].max
    quotient = (x / _spread(scale, scaling, rows, columns)).clamp(-limit, limit)
    values = torch.where(x.isfinite(), quotient, torch.nan).to(FORMATS[format].dtype)
    return Quantized(values=values.contiguous(), scale=scale)


def dequantize(quantized: Quantized) -> Tensor:
    """The dequantized matrix (R, C), float32."""
    rows, columns = quantized.values.shape
    return decode(quantized.values) * expand_scale(quantized.scale, rows, columns)


def round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """The smallest power of two that is not below each element of a float32 tensor of positive normal numbers."""
    return ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def expand_scale(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Scales of any granularity as a tensor that broadcasts against a (rows, columns) matrix.

    The granularity follows from the shape: two scalings with the same shape of scales mean the same. Raises InputError
    where the shape fits no scaling of such a matrix.
    """
    shape = tuple(scale.shape)
    for scaling in Scaling:
        if shape == scale_shape(rows, columns, scaling):
            return _spread(scale, scaling, rows, columns)
    expected = ", ".join(f"{scale_shape(rows, columns, scaling)} {scaling.value}" for scaling in Scaling)
    raise InputError(f"scale of shape {shape} does not fit a matrix of {(rows, columns)}; it can be {expected}")


def _amax(x: Tensor, scaling: Scaling) -> Tensor:
    """Largest finite |x| of each block, in the shape of the scales; x is float32 (R, C) with elements."""
    magnitude = x.abs().nan_to_num(0.0, 0.0, 0.0)
    block, (rows, columns) = block_of(scaling), x.shape
    down, across = block.count(rows, columns)
    if block.columns is None:
        in_rows = magnitude.amax(dim=1, keepdim=True)
    else:
        padded = F.pad(magnitude, (0, -columns % block.columns))
        in_rows = padded.view(rows, across, block.columns).amax(dim=2)
    if block.rows is None:
        return in_rows.amax(dim=0, keepdim=True)
    if block.rows == 1:
        return in_rows
    return F.pad(in_rows, (0, 0, 0, -rows % block.rows)).view(down, block.rows, across).amax(dim=1)


def _spread(scale: Tensor, scaling: Scaling, rows: int, columns: int) -> Tensor:
    """Scales as a tensor that broadcasts against a (rows, columns) matrix."""
    block = block_of(scaling)
    if block.rows is not None and block.rows > 1:
        scale = scale.repeat_interleave(block.rows, dim=0)[:rows]
    if block.columns is not None:
        scale = scale.repeat_interleave(block.columns, dim=1)[:, :columns]
    return scale
