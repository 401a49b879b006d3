"""Lower bound of the time of a piece of work on a device, assuming no gaps between kernels.

A GEMM takes the longer of two times: its FLOPs at the device's peak, and its operands and result at the bandwidth of a
copy. Between GEMMs there is one elementwise pass, whatever it computes, which takes the bytes it must read and write at
that bandwidth. This bounds kernels that each make one pass over their tensors and keep nothing from the kernel before.
Vectors (parameters of norms, biases, scales) count nothing. If tensors stay in the L2 cache between two kernels, the
bound can be beaten, and the share reached is above 100 %.

In FP8 the pass before a GEMM writes its operand with one byte an element; in training also the transposed copy that
wgrad reads, since Hopper's FP8 tensor cores take only K-major operands. An operand that no pass writes is quantized by
a separate pass, and so are the weights in each training step; in inference they are frozen.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loka.devices.targets import DEVICES


class GemmMath(StrEnum):
    """Arithmetic of a variant's GEMMs."""

    TF32 = "tf32"
    BF16 = "bf16"
    FP8 = "fp8"  # precise accumulation
    FP8_FAST = "fp8-fast"  # fast accumulation

    @property
    def is_fp8(self) -> bool:
        """True if operands are FP8."""
        return self in (GemmMath.FP8, GemmMath.FP8_FAST)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peaks of a device: bandwidth in bytes a second, reads plus writes, and FLOPs a second by precision."""

    bandwidth: float
    flops: dict[GemmMath, float]


# Precisions with a peak measured on large square products, and its name in a `DeviceSpec`. TF32's is of smaller ones.
_FLOPS = {GemmMath.BF16: "bfloat16", GemmMath.FP8: "e4m3", GemmMath.FP8_FAST: "e4m3 fast"}


def peaks_of(device: str) -> Peaks | None:
    """The peaks of the device of this name; None if they were not measured."""
    found = next((spec for spec in DEVICES.values() if spec.measured_on and spec.measured_on == device), None)
    if found is None:
        return None
    return Peaks(found.bandwidth, {precision: found.flops[name] for precision, name in _FLOPS.items()})


def product_us(rows: int, columns: int, contraction: int, precision: GemmMath, peaks: Peaks) -> float:
    """Microseconds of the product (rows x contraction) by (contraction x columns), with a BF16 or float32 result.

    Raises KeyError if there is no peak for the precision.
    """
    flops = 2 * rows * columns * contraction / peaks.flops[precision]
    element, operand = sizes_of(precision)
    moved = operand * contraction * (rows + columns) + element * rows * columns
    return 1e6 * max(flops, moved / peaks.bandwidth)


def bytes_us(moved: float, peaks: Peaks) -> float:
    """Microseconds to move `moved` bytes, read plus written."""
    return 1e6 * moved / peaks.bandwidth


def three_products(rows: int, k: int, n: int, precision: GemmMath, training: bool, peaks: Peaks) -> float:
    """Microseconds of fprop, in training also of dgrad and wgrad."""
    total = product_us(rows, n, k, precision, peaks)
    if training:
        total += product_us(rows, k, n, precision, peaks) + product_us(n, k, rows, precision, peaks)
    return total


def sizes_of(precision: GemmMath) -> tuple[int, int]:
    """Bytes of an element of a tensor, and of an element of a GEMM's operand."""
    if precision is GemmMath.TF32:
        return 4, 4
    return 2, 1 if precision.is_fp8 else 2


def written_bytes(precision: GemmMath, training: bool) -> int:
    """Bytes per element that a pass writes for the GEMM after it; FP8 training includes the transposed copy."""
    operand = sizes_of(precision)[1]
    return 2 * operand if precision.is_fp8 and training else operand
