"""Which devices are here, as kernels ask for it."""

from __future__ import annotations

from functools import cache

import torch

FP8_CAPABILITY = (8, 9)  # the first compute capability whose tensor cores take FP8


@cache
def has_fp8(device: int) -> bool:
    """Whether the tensor cores of a CUDA device take FP8."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def unsupported_device(capability: tuple[int, int]) -> str | None:
    """Why no visible CUDA device has this compute capability or a later one, or None where one has."""
    wanted = f"{capability[0]}.{capability[1]}"
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return f"no CUDA device is visible; it needs one of compute capability {wanted}"
    found = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    if max(found) >= capability:
        return None
    best = max(found)
    return f"the device's compute capability is {best[0]}.{best[1]}; it needs {wanted}"
