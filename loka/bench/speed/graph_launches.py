"""Number of kernels that a CUDA graph launches, counted by CUPTI in a replay."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

DEVICE = "CUDA"  # torch's name of the device type
NO_KERNELS = ("Memcpy", "Memset")


def launches_of(replay: Callable[[], object]) -> int | None:
    """Number of kernels in one replay on the current CUDA device, without memcpy and memset; None if none is seen.

    The profiler may lose what runs while it starts, so the second of two runs counts. If it cannot be used at all
    (another tool has CUPTI, or the driver forbids it) the result is None: times are useful without this number.
    """
    try:
        _seen(replay)
        return kernels_among(_seen(replay)) or None
    except RuntimeError:
        return None


def _seen(replay: Callable[[], object]) -> list[str]:
    """Names of the device's activities in one replay."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        replay()
        torch.cuda.synchronize()
    return [event.name for event in found.events() if event.device_type.name == DEVICE]


def kernels_among(names: list[str]) -> int:
    """Number of kernels among a device's activities."""
    return sum(not name.startswith(NO_KERNELS) for name in names)
