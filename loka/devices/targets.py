"""Targets of plans, and their devices.

A new target is a member of `TargetDevice` and its entry in `DEVICES`, and a file of measurements of that name
(`loka/kernels/measurements/data`). Nothing else in LoKA names a device or knows its numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from loka.devices.hopper import H100, H200
from loka.devices.spec import DeviceSpec
from loka.errors import InputError


class TargetDevice(StrEnum):
    """The device that a plan is for."""

    H100 = "h100"
    H200 = "h200"
    REFERENCE = "reference"


DEVICES: Mapping[TargetDevice, DeviceSpec] = {
    TargetDevice.H100: H100,
    TargetDevice.H200: H200,
    TargetDevice.REFERENCE: replace(H100, name="reference", measured_on="", is_reference=True),
}
DEFAULT_TARGET = TargetDevice.H100
DEFAULT = DEVICES[DEFAULT_TARGET]
GPU_TARGETS = tuple(target.value for target, spec in DEVICES.items() if not spec.is_reference)
GPUS = " or ".join(target.upper() for target in GPU_TARGETS)  # for messages: "H100 or H200"


def spec_of(target: str) -> DeviceSpec:
    """The device of a target. Raises InputError for an unknown one."""
    found = next((spec for known, spec in DEVICES.items() if known == target), None)
    if found is None:
        raise InputError(f"target {target!r} is not known; it can be {', '.join(DEVICES)}")
    return found


def means(target: str, name: str) -> bool:
    """True if a CUDA device of this name is the target ("h100"). A MIG partition of a GPU is not."""
    return re.search(rf"\b{re.escape(target)}\b", name, re.IGNORECASE) is not None and "MIG" not in name


def device_named(name: str) -> DeviceSpec | None:
    """The device for the name of a CUDA device ("NVIDIA H200"); None if it is no target's."""
    return next((spec_of(target) for target in GPU_TARGETS if means(target, name)), None)
