"""How many kernels a CUDA graph launches, as CUPTI sees them in a replay."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

DEVICE = "CUDA"  # torch names the type of a device so
NO_KERNELS = ("Memcpy", "Memset")


def launches_of(replay: Callable[[], object]) -> int | None:
    """Kernels of one replay on the current CUDA device, copies and fills of memory left out; None where none is seen.

    The profiler may lose what runs while it starts, so the second of two looks counts. Where it cannot be used at all
    (another tool has CUPTI, or the driver forbids it) no kernel is seen: a time is worth having without their number.
    """
    try:
        _seen(replay)
        return kernels_among(_seen(replay)) or None
    except RuntimeError:
        return None


def _seen(replay: Callable[[], object]) -> list[str]:
    """The names of what the device did."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        replay()
        torch.cuda.synchronize()
    return [event.name for event in found.events() if event.device_type.name == DEVICE]


def kernels_among(names: list[str]) -> int:
    """How many of a device's activities are kernels."""
    return sum(not name.startswith(NO_KERNELS) for name in names)
