"""The reference quantizers and product, which every generated quantizer and fused kernel must match bit for bit.

The canonical sequence of operations, for a matrix x of (R, C), a format with largest finite value MAX, and blocks as
the scaling prescribes (the whole matrix, a row, 128 or 32 neighbours in a row, a square of 128 x 128; a block at the
edge is padded with zeros):

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

The formats (OCP 8-bit Floating Point Specification, revision 1.0):

| format | exponent bits | mantissa bits | largest finite | smallest normal | smallest subnormal | infinities |
|--------|---------------|---------------|----------------|-----------------|--------------------|------------|
| e4m3   | 4             | 3             | 448            | 2^-6            | 2^-9               | no         |
| e5m2   | 5             | 2             | 57344          | 2^-14           | 2^-16              | yes        |

NVFP4 (`nvfp4`) has 4-bit values, e2m1, and scales of two levels, of the matrix and of 16 neighbours in a row:

    whole = amax(x).clamp(min=AMAX_FLOOR) / (448 * 6)
    block = (amax(block) / 6 / whole).clamp(2^-6, 448).to(e4m3)
    scale = whole * block
    q     = torch.where(x.isfinite(), round((x / scale).clamp(-6, 6)), torch.nan).to(e4m3)

where `round` takes the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even mantissa. All of these are e4m3 numbers,
which hold them here: nothing multiplies them but this reference. The order is that of torchao's `nvfp4_quantize`.

The transposed copy of a quantized matrix, made from its FP8 values alone (`requantize_transpose`):
a matrix of (R, C) quantized rowwise serves a GEMM that contracts over C. The GEMM that contracts over R needs it
transposed, with a scale per row of the transpose, which a pass along the rows cannot compute. A single scale is
available once the rows are quantized: the largest row scale, S. Where all scales are powers of two, row scale / S is a
power of two of at most 1, so that

    transposed[c, r] = values[r, c] * (scale[r] / S)

is exact except for values that become subnormal: these are rounded to nearest, ties to even, or to zero. They are small
compared with S.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.errors import InputError
from loka.numerics.enums import Format, Scaling
from loka.numerics.recipe import OperandRecipe
from loka.numerics.scalings import block_of

E2M1_MAX = 6.0
BLOCK = 128  # elements in a row that share a scale in blockwise_1x128
AMAX_FLOOR = 2.0**-100  # lower bound of amax; keeps a zero block's scale positive and normal


@dataclass(frozen=True, slots=True)
class FormatInfo:
    """The numbers that define a format."""

    dtype: torch.dtype
    max: float  # largest finite value
    smallest_normal: float
    smallest_subnormal: float


FORMATS: dict[Format, FormatInfo] = {
    Format.E4M3: FormatInfo(
        dtype=torch.float8_e4m3fn,
        max=448.0,
        smallest_normal=2.0**-6,
        smallest_subnormal=2.0**-9,
    ),
    Format.E5M2: FormatInfo(
        dtype=torch.float8_e5m2,
        max=57344.0,
        smallest_normal=2.0**-14,
        smallest_subnormal=2.0**-16,
    ),
}
_FORMAT_OF = {info.dtype: format for format, info in FORMATS.items()}


@dataclass(frozen=True, slots=True)
class Quantized:
    """An FP8 matrix (R, C), contiguous, and its float32 scales, two-dimensional; a value is `values * scale`."""

    values: Tensor
    scale: Tensor


def scale_shape(rows: int, columns: int, scaling: Scaling) -> tuple[int, int]:
    """Shape of the scales of a (rows, columns) matrix; with nvfp4, of the products of both levels."""
    return block_of(scaling).count(rows, columns)


def static_scale(amax: float, format: Format, power_of_two: bool) -> float:
    """The static scale for a given maximum of |x|, rounded to float32 as in the quantizers.

    Raises InputError where amax is negative or not finite.
    """
    _check_amax(amax)
    # float32 arithmetic, as the quantizers do it on tensors: amax, floor and maximum are float32 values
    (amax32,) = struct.unpack("f", struct.pack("f", amax))
    (scale,) = struct.unpack("f", struct.pack("f", max(amax32, AMAX_FLOOR) / FORMATS[format].max))
    if power_of_two:
        (bits,) = struct.unpack("i", struct.pack("f", scale))
        (scale,) = struct.unpack("f", struct.pack("i", (bits + 0x7FFFFF) & 0x7F800000))
    return float(scale)


def _check_amax(amax: float) -> None:
    if not 0.0 <= amax <= torch.finfo(torch.float32).max:
        raise InputError(f"static scale: amax must be a finite number, zero or above, not {amax}")


def quantize(
    x: Tensor, *, format: Format, scaling: Scaling, power_of_two: bool = False, amax: float | None = None
) -> Quantized:
    """Quantize a matrix x of (R, C), any floating dtype, as the module's docstring describes.

    `amax` is the maximum of |x| of a static scale, which holds for the whole matrix whatever the scaling; None measures
    it. R and C may be zero. With nvfp4, `format` and `power_of_two` say nothing, and `amax` is that of the scale for
    all. Raises InputError where x is not a matrix or amax is not usable.
    """
    if x.dim() != 2:
        raise InputError(f"quantize: a matrix is needed, got shape {tuple(x.shape)}; reshape to (rows, columns) first")
    x = x.detach().float()
    rows, columns = x.shape
    shape = scale_shape(rows, columns, scaling)
    if scaling is Scaling.NVFP4:
        return _quantize_nvfp4(x, amax)
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


def _quantize_nvfp4(x: Tensor, amax: float | None) -> Quantized:
    """Quantize float32 x of (R, C): e2m1 numbers as e4m3 (R, C), scales of (R, C / 16)."""
    info = FORMATS[Format.E4M3]
    rows, columns = x.shape
    blocks = _amax(x, Scaling.NVFP4) if x.numel() else x.new_zeros(scale_shape(rows, columns, Scaling.NVFP4))
    largest = blocks.amax() if x.numel() else x.new_zeros(())
    if amax is not None:
        _check_amax(amax)
        largest = x.new_full((), amax)
    whole = largest.clamp(min=AMAX_FLOOR) / (info.max * E2M1_MAX)
    scale = (blocks / E2M1_MAX / whole).clamp(info.smallest_normal, info.max).to(info.dtype).float() * whole
    quotient = (x / _spread(scale, Scaling.NVFP4, rows, columns)).clamp(-E2M1_MAX, E2M1_MAX)
    # Neighbours of e2m1 differ by half of the power of two at or below them; below 1, which is subnormal, by 0.5.
    powers = (quotient.abs().clamp(min=1.0).view(torch.int32) & 0x7F800000).view(torch.float32)
    rounded = (quotient / (powers / 2)).round() * (powers / 2)
    values = torch.where(x.isfinite(), rounded, torch.nan).to(info.dtype)
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


def decode(values: Tensor) -> Tensor:
    """FP8 values of any shape as float32, exactly; NaN stays NaN.

    torch converts e4m3 one value at a time on a CPU, which takes longer than the product that the values are for. There
    the bits are moved instead: e4m3 is float16 with another bias and a shorter mantissa, subnormals included.
    """
    if values.dtype is not torch.float8_e4m3fn or values.device.type != "cpu" or torch.compiler.is_compiling():
        return values.float()
    half = values.view(torch.int8).to(torch.int16)  # with copies of the sign from bit 7 upwards
    all_ones = half.bitwise_and(0x7F).add_(1).bitwise_and_(0x80)  # 0x80 for the pattern that is NaN, else 0
    half.bitwise_and_(~0x80).bitwise_or_(all_ones).bitwise_left_shift_(7)
    return half.view(torch.float16).float().mul_(2.0**8)  # the difference of the biases


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


def _are_powers_of_two(scale: Tensor) -> bool:
    normal = scale.isfinite() & (scale >= torch.finfo(torch.float32).smallest_normal)
    return bool((normal & (round_up_to_power_of_two(scale.float()) == scale)).all())


def fake_quantize(x: Tensor, recipe: OperandRecipe) -> Tensor:
    """The operand x of (R, C), contracted over C, quantized by `recipe` and dequantized: float32 (R, C).

    A transposed operand is made as in training, from the FP8 copy of its transpose. Raises InputError where x is not a
    matrix, or the recipe's static range has no `amax`.
    """
    if recipe.lacks_amax:
        raise InputError("fake_quantize: a recipe with range static needs an amax")
    if recipe.transposed:
        source = quantize(x.t(), format=recipe.format, scaling=Scaling.ROWWISE, power_of_two=True)
        return dequantize(requantize_transpose(source))
    return dequantize(
        quantize(x, format=recipe.format, scaling=recipe.scaling, power_of_two=recipe.power_of_two, amax=recipe.amax)
    )


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
