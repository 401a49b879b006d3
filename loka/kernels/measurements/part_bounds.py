"""Lower bound of a part's time from its bytes and FLOPs, to scale measured times to other sizes.

Only ratios of bounds of one kind of part are used, so that the share of the peak that a device reaches cancels.
"""

from __future__ import annotations

from dataclasses import replace

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.kernels.measurements.interaction_forms import moved as elements_moved
from loka.kernels.measurements.parts import INTERACTIONS, Part, PartKind

# Minimum time of a kernel, us. An assumption: the smallest GEMMs measured in graphs take 3.2 us in total.
START_US = 2.0

ALIGNMENT = 16  # bytes: kernels for other row lengths are different, or pad

# Passes over a matrix in the model's dtype, and in FP8, of memory-bound work.
_PASSES = {
    PartKind.QUANTIZE: (1, 1),
    PartKind.REQUANTIZE_TRANSPOSE: (0, 2),
    PartKind.FORWARD: (2, 0),
    PartKind.BACKWARD: (3, 0),
    PartKind.COPY: (2, 0),
}


def element_bytes(dtype: str) -> int:
    """Bytes of an element in a model's dtype."""
    return 4 if dtype == "float32" else 2


def is_aligned(part: Part) -> bool:
    """True if rows begin at multiples of ALIGNMENT: of a GEMM's operands, in FP8 or in the dtype, and of the result."""
    element = 1 if part.work is PartKind.GEMM and part.recipe else element_bytes(part.dtype)
    return part.columns * element % ALIGNMENT == 0 and part.contraction * element % ALIGNMENT == 0


def bound_us(part: Part, device: DeviceSpec = DEFAULT) -> float:
    """Lower bound of a part's time, in microseconds; it grows with each of its sizes."""
    element = element_bytes(part.dtype)
    if part.work in INTERACTIONS:
        return START_US + 1e6 * elements_moved(part) * element / device.bandwidth
    if part.work is not PartKind.GEMM:
        plain, quantized = _PASSES[part.work]
        return START_US + 1e6 * part.rows * part.columns * (plain * element + quantized) / device.bandwidth
    operand = 1 if part.recipe else element
    moved = operand * part.contraction * (part.rows + part.columns) + element * part.rows * part.columns
    peak = device.flops["e4m3"] if part.recipe else device.flops.get(part.dtype, device.flops["bfloat16"])
    flops = 2 * part.rows * part.columns * part.contraction
    return START_US + 1e6 * max(moved / device.bandwidth, flops / peak)


def interaction_us(part: Part, device: DeviceSpec = DEFAULT) -> float:
    """Estimated time of an interaction's rendered kernel that was not measured, in microseconds."""
    return START_US + 1e6 * elements_moved(part) * element_bytes(part.dtype) / device.interaction_bandwidth


def padded(part: Part) -> Part:
    """A GEMM with columns and contraction up to the next multiple of ALIGNMENT, in the model's dtype."""
    step = ALIGNMENT // element_bytes(part.dtype)
    columns, contraction = (-(-size // step) * step for size in (part.columns, part.contraction))
    return replace(part, columns=columns, contraction=contraction)


def padding_us(part: Part, device: DeviceSpec = DEFAULT) -> float:
    """Estimated time of the copies that make `padded` of a GEMM in the model's dtype, in microseconds.

    A contraction that is not aligned pads both operands; columns that are not pad the second one.
    """
    whole = padded(part)
    first = part.rows * part.contraction if whole.contraction != part.contraction else 0
    second = part.columns * part.contraction if whole != part else 0
    copies = (first > 0) + (second > 0)
    return START_US * copies + 1e6 * 2 * (first + second) * element_bytes(part.dtype) / device.bandwidth
