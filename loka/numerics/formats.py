"""The two 8-bit float formats (OCP 8-bit Floating Point Specification, revision 1.0).

| format | exponent bits | mantissa bits | largest finite | smallest normal | smallest subnormal | infinities |
|--------|---------------|---------------|----------------|-----------------|--------------------|------------|
| e4m3   | 4             | 3             | 448            | 2^-6            | 2^-9               | no         |
| e5m2   | 5             | 2             | 57344          | 2^-14           | 2^-16              | yes        |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
