"""A bound on the time of a part from its bytes and FLOPs: for scaling a measured time to sizes that nobody measured.

Only ratios of bounds of one kind of part are used, so that what a device reaches of its peaks cancels.
"""

from __future__ import annotations

from loka.kernels.measurements.interaction_forms import moved as elements_moved
from loka.kernels.measurements.parts import INTERACTIONS, Part, PartKind

# Measured on an H100: a copy of 1 GiB; products of 8192 x 8192 x 8192, in TF32 of 8192 x 2048 x 2048 (docs/bench.md).
BANDWIDTH = 2.43e12  # bytes a second
FP8_FLOPS = 1277e12
FLOPS = {"bfloat16": 732e12, "float16": 732e12, "float32": 344e12}
# What kernels of FM interactions and concat_norms were measured to read and write (docs/results/LOG.md, "where
# Wukong small's step went": 1.07 GB of a concat_norm's gradients in 379 us, 0.80 GB of its forward in 283 us).
INTERACTION_BANDWIDTH = 2.9e12  # bytes a second
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


def bound_us(part: Part) -> float:
    """Microseconds below which a part hardly goes; it grows with each of its sizes."""
    element = element_bytes(part.dtype)
    if part.work in INTERACTIONS:
        return START_US + 1e6 * elements_moved(part) * element / BANDWIDTH
    if part.work is not PartKind.GEMM:
        plain, quantised = _PASSES[part.work]
        return START_US + 1e6 * part.rows * part.columns * (plain * element + quantised) / BANDWIDTH
    operand = 1 if part.recipe else element
    moved = operand * part.contraction * (part.rows + part.columns) + element * part.rows * part.columns
    peak = FP8_FLOPS if part.recipe else FLOPS.get(part.dtype, FLOPS["bfloat16"])
    flops = 2 * part.rows * part.columns * part.contraction
    return START_US + 1e6 * max(moved / BANDWIDTH, flops / peak)


def interaction_us(part: Part) -> float:
    """What a rendered kernel of an interaction is expected to take where none was measured, in microseconds."""
    return START_US + 1e6 * elements_moved(part) * element_bytes(part.dtype) / INTERACTION_BANDWIDTH


def added_us(rows: int, columns: int, dtype: str) -> float:
    """What a pass takes that adds two matrices, in microseconds."""
    return START_US + 1e6 * 3 * rows * columns * element_bytes(dtype) / BANDWIDTH
