"""Capabilities of the visible CUDA devices."""

from __future__ import annotations

from functools import cache

import torch

FP8_CAPABILITY = (8, 9)  # the first compute capability with FP8 tensor cores


@cache
def has_fp8(device: int) -> bool:
    """True if a CUDA device has FP8 tensor cores."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def unsupported_device(capability: tuple[int, int]) -> str | None:
    """Reason why no visible CUDA device has at least this compute capability; None where one has."""
    wanted = f"{capability[0]}.{capability[1]}"
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return f"no CUDA device is visible; it needs one of compute capability {wanted}"
    found = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    if max(found) >= capability:
        return None
    best = max(found)
    return f"the device's compute capability is {best[0]}.{best[1]}; it needs {wanted}"
