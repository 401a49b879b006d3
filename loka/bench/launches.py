"""How many kernels a CUDA graph launches, as CUPTI sees them in a replay."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

DEVICE = "CUDA"  # torch names the type of a device so
NO_KERNELS = ("Memcpy", "Memset")


def launches_of(replay: Callable[[], object]) -> int | None:
    """Kernels of one replay on the current CUDA device, copies and fills of memory left out; None where none is seen.

    The profiler may lose what runs while it starts, so the second of two looks counts.
    """
    found = 0
    for _ in range(2):
        gc.collect()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            replay()
            torch.cuda.synchronize()
        found = kernels_among([event.name for event in seen.events() if event.device_type.name == DEVICE])
    return found or None


def kernels_among(names: list[str]) -> int:
    """How many of a device's activities are kernels."""
    return sum(not name.startswith(NO_KERNELS) for name in names)
