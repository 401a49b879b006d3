"""The devices that plans are for.

A new target is an entry in `DEVICES`, and a file of measurements of its name (`loka/kernels/measurements/data`).
Nothing else in LoKA names a device or knows its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from loka.devices.data_sheets import B200, GB200, H20, H100_PCIE, MI300X, MI350X
from loka.devices.hopper import H100, H200
from loka.devices.spec import DeviceSpec
from loka.errors import Code, InputError

REFERENCE = replace(H100, name="reference", title="reference", pattern="(?!)", measured_on="", is_reference=True)
DEVICES: Mapping[str, DeviceSpec] = {
    spec.name: spec for spec in (H100, H100_PCIE, H200, H20, B200, GB200, MI300X, MI350X, REFERENCE)
}
DEFAULT = H100
GPU_TARGETS = tuple(spec.name for spec in DEVICES.values() if not spec.is_reference)
_TITLES = [DEVICES[target].title for target in GPU_TARGETS]
GPUS = f"{', '.join(_TITLES[:-1])} or {_TITLES[-1]}"  # for messages: "H100, H200 or B200"

NO_RTX = (  # sm_120
    "GeForce RTX and RTX PRO GPUs of compute capability 12.0 are no target: missing are launches of kernels for 99 KiB "
    "of shared memory a block, and a table of what their scaled_mm takes"
)


def spec_of(target: str) -> DeviceSpec:
    """The device of a target. Raises InputError for an unknown one."""
    found = DEVICES.get(target)
    if found is None:
        raise InputError(f"target {target!r} is not known; it can be {', '.join(DEVICES)}", Code.VALUE)
    return found


def device_named(name: str) -> DeviceSpec | None:
    """The device for the name that CUDA or ROCm gives ("NVIDIA H200"); None if it is no target's."""
    return next((spec for spec in DEVICES.values() if spec.is_named(name)), None)
