"""The time that a piece of work cannot go below on a device, if nothing is lost between its kernels.

A GEMM takes the longer of its FLOPs at the device's peak and its operands and result at the bandwidth of a copy.
Between GEMMs stands one elementwise pass, whatever it computes, which takes the bytes that it must read and write at
that bandwidth: a bound for kernels of which each makes one pass over its tensors and keeps nothing from the one before.
Vectors (the parameters of norms, biases, scales) count nothing. Where tensors stay in the L2 cache between two kernels,
the bound can be beaten: a share above 100 % says so.

In FP8 the pass before a GEMM writes its operand as one byte an element; in training also the transposed copy that
grad-weight reads, since Hopper's FP8 tensor cores take K-major operands alone. An operand that no pass makes is
quantised by a pass of its own, and so are the weights in each training step; in inference they are frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loka.bench.subjects.variants import Precision
from loka.devices.targets import DEVICES


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a device reaches at best: bytes a second read and written, and FLOPs a second by precision."""

    bandwidth: float
    flops: dict[Precision, float]


# Precisions with a peak from large square products, and what a `DeviceSpec` calls it. TF32's is of smaller ones.
_FLOPS = {Precision.BF16: "bfloat16", Precision.FP8: "e4m3", Precision.FP8_FAST: "e4m3 fast"}


@dataclass(frozen=True, slots=True)
class RooflineChain:
    """x of (rows, widths[0]) through len(widths) - 1 linears, an elementwise pass between each two.

    `before` and `after`: whether such a pass (a norm, an activation) also stands before the first and after the last.
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
    fed: int  # elements of the input that an elementwise pass makes for it; 0 where none does


def peaks_of(device: str) -> Peaks | None:
    """The peaks of a device by its name, None where they were not measured."""
    found = next((spec for spec in DEVICES.values() if spec.measured_on and spec.measured_on == device), None)
    if found is None:
        return None
    return Peaks(found.bandwidth, {precision: found.flops[name] for precision, name in _FLOPS.items()})


def product_us(rows: int, columns: int, contraction: int, precision: Precision, peaks: Peaks, copies: int = 1) -> float:
    """Microseconds of `copies` products (rows x contraction) by (contraction x columns), the result in BF16 or float32.

    Raises KeyError where the peaks have none for the precision.
    """
    flops = 2 * rows * columns * contraction / peaks.flops[precision]
    element, operand = _sizes(precision)
    moved = operand * contraction * (rows + columns) + element * rows * columns
    return 1e6 * copies * max(flops, moved / peaks.bandwidth)


def bytes_us(moved: float, peaks: Peaks) -> float:
    """Microseconds of bytes read and written."""
    return 1e6 * moved / peaks.bandwidth


def chain_us(chain: RooflineChain, precision: Precision, training: bool, peaks: Peaks) -> float | None:
    """Microseconds of a chain, forward alone or forward and backward to its input and all weights.

    None where the precision has no peak. All linears are in `precision`.
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
    """Bytes of the elementwise and quantising passes of a chain's forward."""
    element, operand = _sizes(precision)
    written = _written(precision, training)
    moved = 0
    for index, (k, n) in enumerate(_linears(chain)):
        if index or chain.before or precision.is_fp8:
            moved += chain.rows * k * (element + written)
        if precision.is_fp8 and training:
            moved += n * k * (element + 2 * operand)  # the copy that fprop reads, and dgrad's
    if chain.after:
        moved += chain.rows * chain.widths[-1] * 2 * element
    return moved


def chain_backward_bytes(chain: RooflineChain, precision: Precision) -> int:
    """Bytes of the elementwise and quantising passes of a chain's backward."""
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
    """Microseconds of a model's GEMMs, and of one elementwise pass before each that is fed by one.

    Sites that are not FP8 count in BF16, or in TF32 where that is the precision. What is not counted, so that the bound
    is lower than a model of every operation would give: operands of a pass beyond the first (residuals, the parts of a
    concatenation), copies and transposes, what follows the last GEMM, and what has no GEMM at all (embeddings, loss).
    None where a precision has no peak.
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
    """fprop, and in training dgrad and wgrad."""
    total = product_us(rows, n, k, precision, peaks)
    if training:
        total += product_us(rows, k, n, precision, peaks) + product_us(n, k, rows, precision, peaks)
    return total


def _linears(chain: RooflineChain) -> Sequence[tuple[int, int]]:
    return tuple(zip(chain.widths[:-1], chain.widths[1:], strict=True))


def _sizes(precision: Precision) -> tuple[int, int]:
    """Bytes of an element of a tensor, and of a GEMM's operand."""
    if precision is Precision.TF32:
        return 4, 4
    return 2, 1 if precision.is_fp8 else 2


def _written(precision: Precision, training: bool) -> int:
    """Bytes an element that a pass writes for the GEMM after it: in FP8 training also the transposed copy."""
    operand = _sizes(precision)[1]
    return 2 * operand if precision.is_fp8 and training else operand
