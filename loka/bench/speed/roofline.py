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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loka.bench.subjects.variants import Precision
from loka.devices.targets import DEVICES


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peaks of a device: bandwidth in bytes a second, reads plus writes, and FLOPs a second by precision."""

    bandwidth: float
    flops: dict[Precision, float]


# Precisions with a peak measured on large square products, and its name in a `DeviceSpec`. TF32's is of smaller ones.
_FLOPS = {Precision.BF16: "bfloat16", Precision.FP8: "e4m3", Precision.FP8_FAST: "e4m3 fast"}


@dataclass(frozen=True, slots=True)
class RooflineChain:
    """x of (rows, widths[0]) through len(widths) - 1 linears, with an elementwise pass between each two.

    `before`, `after`: there is such a pass (a norm, an activation) also before the first and after the last linear.
    """

    rows: int
    widths: tuple[int, ...]
    before: bool
    after: bool


@dataclass(frozen=True, slots=True)
class SiteWork:
    """One GEMM site of a model: rows x k by n x k, `calls` times a step."""

    rows: int
    k: int
    n: int
    calls: int
    fp8: bool
    fed: int  # elements of the input that an elementwise pass writes for it; 0 if none does


def peaks_of(device: str) -> Peaks | None:
    """The peaks of the device of this name; None if they were not measured."""
    found = next((spec for spec in DEVICES.values() if spec.measured_on and spec.measured_on == device), None)
    if found is None:
        return None
    return Peaks(found.bandwidth, {precision: found.flops[name] for precision, name in _FLOPS.items()})


def product_us(rows: int, columns: int, contraction: int, precision: Precision, peaks: Peaks, copies: int = 1) -> float:
    """Microseconds of `copies` products (rows x contraction) by (contraction x columns), with BF16 or float32 results.

    Raises KeyError if there is no peak for the precision.
    """
    flops = 2 * rows * columns * contraction / peaks.flops[precision]
    element, operand = _sizes(precision)
    moved = operand * contraction * (rows + columns) + element * rows * columns
    return 1e6 * copies * max(flops, moved / peaks.bandwidth)


def bytes_us(moved: float, peaks: Peaks) -> float:
    """Microseconds to move `moved` bytes, read plus written."""
    return 1e6 * moved / peaks.bandwidth


def chain_us(chain: RooflineChain, precision: Precision, training: bool, peaks: Peaks) -> float | None:
    """Microseconds of a chain: forward, in training also backward to its input and all weights.

    All linears run in `precision`. None if it has no peak.
    """
    if precision not in peaks.flops:
        return None
    passes = chain_forward_bytes(chain, precision, training)
    if training:
        passes += chain_backward_bytes(chain, precision)
    total = bytes_us(passes, peaks)
    for k, n in _linears(chain):
        total += _three_products(chain.rows, k, n, precision, training, peaks)
    return total


def chain_forward_bytes(chain: RooflineChain, precision: Precision, training: bool) -> int:
    """Bytes of the elementwise and quantizing passes of a chain's forward."""
    element, operand = _sizes(precision)
    written = _written(precision, training)
    moved = 0
    for index, (k, n) in enumerate(_linears(chain)):
        if index or chain.before or precision.is_fp8:
            moved += chain.rows * k * (element + written)
        if precision.is_fp8 and training:
            moved += n * k * (element + 2 * operand)  # read the weight, write the copies for fprop and dgrad
    if chain.after:
        moved += chain.rows * chain.widths[-1] * 2 * element
    return moved


def chain_backward_bytes(chain: RooflineChain, precision: Precision) -> int:
    """Bytes of the elementwise and quantizing passes of a chain's backward."""
    element, _ = _sizes(precision)
    written = _written(precision, training=True)
    rows, last = chain.rows, chain.widths[-1]
    moved = 0
    if chain.after:
        moved += rows * last * (2 * element + written)  # the gradient and what the forward saved
    elif precision.is_fp8:
        moved += rows * last * (element + written)
    moved += sum(rows * width * (2 * element + written) for width in chain.widths[1:-1])
    if chain.before:
        moved += rows * chain.widths[0] * 3 * element
    return moved


def model_us(sites: Iterable[SiteWork], precision: Precision, training: bool, peaks: Peaks) -> float | None:
    """Microseconds of a model's GEMMs and of one elementwise pass before each that is fed by one.

    Sites outside FP8 count in BF16, or in TF32 if that is `precision`. Not counted, which makes the bound lower than a
    model of every operation would be: operands of a pass beyond the first (residuals, the parts of a concatenation),
    copies and transposes, operations after the last GEMM, and parts without GEMMs (embeddings, loss). None if a
    precision has no peak.
    """
    rest = Precision.TF32 if precision is Precision.TF32 else Precision.BF16
    if precision not in peaks.flops or rest not in peaks.flops:
        return None
    total = 0.0
    for site in sites:
        used = precision if site.fp8 and precision.is_fp8 else rest
        element, operand = _sizes(used)
        total += site.calls * _three_products(site.rows, site.k, site.n, used, training, peaks)
        passes = site.fed * (element + _written(used, training))
        if training:
            passes += site.fed * (2 * element + _written(used, training))
            passes += site.n * site.k * (element + 2 * operand) if used.is_fp8 else 0
        total += bytes_us(passes, peaks)
    return total


def _three_products(rows: int, k: int, n: int, precision: Precision, training: bool, peaks: Peaks) -> float:
    """Microseconds of fprop, in training also of dgrad and wgrad."""
    total = product_us(rows, n, k, precision, peaks)
    if training:
        total += product_us(rows, k, n, precision, peaks) + product_us(n, k, rows, precision, peaks)
    return total


def _linears(chain: RooflineChain) -> Sequence[tuple[int, int]]:
    return tuple(zip(chain.widths[:-1], chain.widths[1:], strict=True))


def _sizes(precision: Precision) -> tuple[int, int]:
    """Bytes of an element of a tensor, and of an element of a GEMM's operand."""
    if precision is Precision.TF32:
        return 4, 4
    return 2, 1 if precision.is_fp8 else 2


def _written(precision: Precision, training: bool) -> int:
    """Bytes per element that a pass writes for the GEMM after it; FP8 training includes the transposed copy."""
    operand = _sizes(precision)[1]
    return 2 * operand if precision.is_fp8 and training else operand
