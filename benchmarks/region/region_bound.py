"""Lower bound of the time of a region: its products, and one elementwise pass between each two; see `roofline`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.roofline import GemmMath, Peaks, bytes_us, sizes_of, three_products, written_bytes


@dataclass(frozen=True, slots=True)
class RooflineChain:
    """x of (rows, widths[0]) through len(widths) - 1 linears, with an elementwise pass between each two.

    `before`, `after`: there is such a pass (a norm, an activation) also before the first and after the last linear.
    """

    rows: int
    widths: tuple[int, ...]
    before: bool
    after: bool


def chain_us(chain: RooflineChain, precision: GemmMath, training: bool, peaks: Peaks) -> float | None:
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
        total += three_products(chain.rows, k, n, precision, training, peaks)
    return total


def chain_forward_bytes(chain: RooflineChain, precision: GemmMath, training: bool) -> int:
    """Bytes of the elementwise and quantizing passes of a chain's forward."""
    element, operand = sizes_of(precision)
    written = written_bytes(precision, training)
    moved = 0
    for index, (k, n) in enumerate(_linears(chain)):
        if index or chain.before or precision.is_fp8:
            moved += chain.rows * k * (element + written)
        if precision.is_fp8 and training:
            moved += n * k * (element + 2 * operand)  # read the weight, write the copies for fprop and dgrad
    if chain.after:
        moved += chain.rows * chain.widths[-1] * 2 * element
    return moved


def chain_backward_bytes(chain: RooflineChain, precision: GemmMath) -> int:
    """Bytes of the elementwise and quantizing passes of a chain's backward."""
    element, _ = sizes_of(precision)
    written = written_bytes(precision, training=True)
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


def _linears(chain: RooflineChain) -> Sequence[tuple[int, int]]:
    return tuple(zip(chain.widths[:-1], chain.widths[1:], strict=True))
