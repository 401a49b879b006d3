"""Kernels that a step runs on the device, counted and timed by CUPTI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

DEVICE = "CUDA"  # torch's name of the device type
NO_KERNELS = ("Memcpy", "Memset")


@dataclass(frozen=True, slots=True)
class DeviceActivity:
    """One kernel, copy or fill of memory on the device."""

    name: str
    microseconds: float


@dataclass(frozen=True, slots=True)
class KernelSum:
    """The device's work in one step. `milliseconds` counts copies and fills of memory too, `launches` does not."""

    launches: int
    milliseconds: float


def kernel_sum_of(step: Callable[[], object]) -> KernelSum | None:
    """The device's work in one step on the current CUDA device; None if none is seen.

    The profiler may lose what runs while it starts, so the second of two runs counts. If it cannot be used at all
    (another tool has CUPTI, or the driver forbids it) the result is None: times are useful without these numbers.
    """
    try:
        _seen(step)
        found = _seen(step)
    except RuntimeError:
        return None
    launches = kernels_among([each.name for each in found])
    return KernelSum(launches, sum(each.microseconds for each in found) / 1e3) if launches else None


def launches_of(replay: Callable[[], object]) -> int | None:
    """Number of kernels in one replay, without memcpy and memset; None as `kernel_sum_of`."""
    found = kernel_sum_of(replay)
    return found.launches if found is not None else None


def _seen(step: Callable[[], object]) -> list[DeviceActivity]:
    """The device's activities in one step; ranges that annotate them are none."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    return [
        DeviceActivity(event.name, event.device_time_total)
        for event in found.events()
        if event.device_type.name == DEVICE and not getattr(event, "is_user_annotation", False)
    ]


def kernels_among(names: Sequence[str]) -> int:
    """Number of kernels among a device's activities."""
    return sum(not name.startswith(NO_KERNELS) for name in names)
