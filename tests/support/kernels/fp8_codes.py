"""FP8 values as the integers that they are stored as."""

from __future__ import annotations

import torch
from torch import Tensor


def same_nan(values: Tensor) -> Tensor:
    """The bytes of e4m3, NaN without its sign."""
    codes = values.view(torch.uint8)
    return torch.where(codes & 0x7F == 0x7F, 0x7F, codes)


def same_nan_of(values: Tensor) -> Tensor:
    """The bytes of FP8; NaN, which e5m2 has several of, as one."""
    if values.dtype == torch.float8_e4m3fn:
        return same_nan(values)
    return torch.where(values.float().isnan(), 0x7F, values.view(torch.uint8))


def ordered(values: Tensor) -> Tensor:
    """e4m3 values as integers, neighbours one apart."""
    codes = values.view(torch.uint8).int()
    return torch.where(codes >= 128, 128 - codes, codes)
