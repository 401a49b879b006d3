"""A bound on the time of a part from its bytes and FLOPs: for scaling a measured time to sizes that nobody measured.

Only ratios of bounds of one kind of part are used, so that what a device reaches of its peaks cancels.
"""

from __future__ import annotations

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.kernels.measurements.interaction_forms import moved as elements_moved
from loka.kernels.measurements.parts import INTERACTIONS, Part, PartKind

# What a kernel takes however little it does. An assumption: the smallest GEMMs measured in graphs take 3.2 us in all.
START_US = 2.0

# Passes over a matrix in the model's dtype, and in FP8, of the works that are bound by memory.
_PASSES = {
    PartKind.QUANTISE: (1, 1),
    PartKind.REQUANTIZE_TRANSPOSE: (0, 2),
    PartKind.FORWARD: (2, 0),
    PartKind.BACKWARD: (3, 0),
    PartKind.COPY: (2, 0),
}


def element_bytes(dtype: str) -> int:
    """Of a number in a model's dtype."""
    return 4 if dtype == "float32" else 2


def bound_us(part: Part, device: DeviceSpec = DEFAULT) -> float:
    """Microseconds below which a part hardly goes; it grows with each of its sizes."""
    element = element_bytes(part.dtype)
    if part.work in INTERACTIONS:
        return START_US + 1e6 * elements_moved(part) * element / device.bandwidth
    if part.work is not PartKind.GEMM:
        plain, quantised = _PASSES[part.work]
        return START_US + 1e6 * part.rows * part.columns * (plain * element + quantised) / device.bandwidth
    operand = 1 if part.recipe else element
    moved = operand * part.contraction * (part.rows + part.columns) + element * part.rows * part.columns
    peak = device.flops["e4m3"] if part.recipe else device.flops.get(part.dtype, device.flops["bfloat16"])
    flops = 2 * part.rows * part.columns * part.contraction
    return START_US + 1e6 * max(moved / device.bandwidth, flops / peak)


def interaction_us(part: Part, device: DeviceSpec = DEFAULT) -> float:
    """What a rendered kernel of an interaction is expected to take where none was measured, in microseconds."""
    return START_US + 1e6 * elements_moved(part) * element_bytes(part.dtype) / device.interaction_bandwidth


def added_us(rows: int, columns: int, dtype: str, device: DeviceSpec = DEFAULT) -> float:
    """What a pass takes that adds two matrices, in microseconds."""
    return START_US + 1e6 * 3 * rows * columns * element_bytes(dtype) / device.bandwidth
