"""The dtype in which a GEMM returns its result."""

from __future__ import annotations

import torch


def output_dtype(x: torch.Tensor) -> torch.dtype:
    """What F.linear would return for an input `x`: under torch.autocast its dtype, elsewhere that of `x`.

    Like autocast itself, it leaves float64 alone. Safe under torch.compile, which guards on the autocast state.
    """
    device = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype
