"""The two 8-bit float formats (OCP 8-bit Floating Point Specification, revision 1.0).

| format | exponent bits | mantissa bits | largest finite | smallest normal | smallest subnormal | infinities |
|--------|---------------|---------------|----------------|-----------------|--------------------|------------|
| e4m3   | 4             | 3             | 448            | 2^-6            | 2^-9               | no         |
| e5m2   | 5             | 2             | 57344          | 2^-14           | 2^-16              | yes        |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.numerics.enums import Format


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
