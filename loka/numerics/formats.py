"""The two 8-bit float formats (OCP 8-bit Floating Point Specification, revision 1.0) and rounding into them.

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
    mantissa_bits: int  # stored ones; the leading one of a normal number is not stored
    has_infinity: bool
    overflow: float  # the smallest float32 that rounds beyond max: past the tie for e4m3, the tie itself for e5m2


FORMATS: dict[Format, FormatInfo] = {
    Format.E4M3: FormatInfo(
        dtype=torch.float8_e4m3fn,
        max=448.0,
        smallest_normal=2.0**-6,
        smallest_subnormal=2.0**-9,
        mantissa_bits=3,
        has_infinity=False,
        overflow=464.0 + 2.0**-15,
    ),
    Format.E5M2: FormatInfo(
        dtype=torch.float8_e5m2,
        max=57344.0,
        smallest_normal=2.0**-14,
        smallest_subnormal=2.0**-16,
        mantissa_bits=2,
        has_infinity=True,
        overflow=61440.0,
    ),
}


def to_fp8(x: Tensor, format: Format, saturate: bool) -> Tensor:
    """Round every element of x (any shape, floating point) to the nearest FP8 value, ties to even.

    Rounding happens once, from float32, which holds every bfloat16 and float16 value; signed zeros keep their sign.
    Beyond the largest finite value:

    | x                                  | saturate=False                      | saturate=True |
    |------------------------------------|-------------------------------------|---------------|
    | finite, rounds to the maximum      | maximum                             | maximum       |
    | finite, rounds beyond the maximum  | e4m3: NaN, e5m2: infinity           | maximum       |
    | infinity                           | e4m3: NaN, e5m2: infinity           | NaN           |
    | NaN                                | NaN                                 | NaN           |

    Saturating, infinity becomes NaN in both formats: a GPU's saturating conversion would turn it into the maximum,
    and a poisoned value would look like a good one. Nothing is left to the overflow of torch's own conversion, which
    differs between versions (e4m3: NaN in 2.11, the maximum in 2.13, for infinity too).
    """
    info = FORMATS[format]
    x = x.float()
    if saturate:
        return torch.where(x.isfinite(), x.clamp(-info.max, info.max), torch.nan).to(info.dtype)
    beyond = torch.copysign(torch.tensor(torch.inf if info.has_infinity else torch.nan, device=x.device), x)
    return torch.where(x.abs() >= info.overflow, beyond, x).to(info.dtype)
