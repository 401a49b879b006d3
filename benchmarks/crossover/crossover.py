"""Crossover of FP8 and BF16 by M, K and N, computed from recorded parts.

For a linear y = x @ weight.T, x of (M, K) and a weight of (N, K), the ratio of BF16's time to FP8's in four views:

- GEMM: only fprop, operands already quantized, the faster of rowwise and tensorwise scaling, precise accumulation;
- GEMM, fast: the same with fast accumulation;
- quantized: fprop (precise) plus quantizing x and the weight, one pass each;
- trained: fprop, dgrad and wgrad (precise) plus quantizing x, the weight and the output gradient once each, and
  transposing all three for the GEMMs that contract over their other dimension.

Above 1, FP8 is faster. A ratio closer to 1 than the spreads of both times is a tie, and only a ratio beyond that counts
as a gain. Interpolated and estimated times are not used: a cell without its own measurements is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from loka.bench.markdown import Table, markdown_table
from loka.bench.record.gemm_parts import NATIVE, SCALED_MM
from loka.bench.record.grid import POWERS
from loka.bench.results import NOTHING
from loka.kernels.measurements.parts import Part, PartCosts, PartKind, PartTime, TimeSource

SIZES = POWERS  # of M, K and N
TIE = "="  # before a ratio inside the spreads


class CrossoverView(StrEnum):
    """The work that is timed in both precisions."""

    GEMM = "GEMM"
    FAST = "GEMM, fast"
    QUANTIZED = "quantized"
    TRAINED = "trained"


TITLES = {
    CrossoverView.GEMM: "GEMM alone, precise accumulation",
    CrossoverView.FAST: "GEMM alone, fast accumulation",
    CrossoverView.QUANTIZED: "GEMM with quantization of x and the weight",
    CrossoverView.TRAINED: "fprop, dgrad and wgrad with quantization and transposition",
}
_ROWS, _ONE = "e4m3 rowwise", "e4m3 tensorwise"


@dataclass(frozen=True, slots=True)
class Ratio:
    """BF16's time over FP8's, and its uncertainty from the spreads of both."""

    value: float
    noise: float

    @property
    def tie(self) -> bool:
        """True if the ratio differs from 1 by no more than the spreads."""
        return abs(self.value - 1.0) <= self.noise

    @property
    def gains(self) -> bool:
        """True if FP8 is faster beyond the spreads."""
        return self.value > 1.0 and not self.tie


Shape = tuple[int, int, int]  # M, K, N
Map = dict[CrossoverView, dict[Shape, Ratio]]


def crossover(costs: PartCosts, sizes: Sequence[int] = SIZES) -> Map:
    """The ratio of each view at each shape that was measured in both precisions."""
    shapes = [(m, k, n) for k in sizes for n in sizes for m in sizes]
    found: Map = {}
    for view in CrossoverView:
        ratios = {shape: ratio_at(costs, view, shape) for shape in shapes}
        found[view] = {shape: ratio for shape, ratio in ratios.items() if ratio is not None}
    return found


def ratio_at(costs: PartCosts, view: CrossoverView, shape: Shape) -> Ratio | None:
    """BF16 over FP8 at one shape; None if a part of it was not measured."""
    plain = total(plain_gemm(costs, *sizes) for sizes, _ in _gemms(view, shape))
    accumulation = "fast" if view is CrossoverView.FAST else "precise"
    gemms = [fp8_gemm(costs, *sizes, accumulation, scalings) for sizes, scalings in _gemms(view, shape)]
    quantized = total([*gemms, *(measured(costs, part) for part in _producers(view, shape))])
    if plain is None or quantized is None:
        return None
    value = plain.us / quantized.us
    return Ratio(value, value * (plain.spread + quantized.spread))


def plain_gemm(costs: PartCosts, rows: int, columns: int, contraction: int) -> PartTime | None:
    """Time of a GEMM in BF16."""
    return measured(costs, Part(PartKind.GEMM, NATIVE, rows, columns, contraction))


def fp8_gemm(
    costs: PartCosts, rows: int, columns: int, contraction: int, accumulation: str, scalings: Sequence[str]
) -> PartTime | None:
    """The least measured time of cuBLASLt's FP8 GEMM over these scalings of the operands."""
    recipes = (f"{scaling}, {scaling}, {accumulation}" for scaling in scalings)
    found = [
        measured(costs, Part(PartKind.GEMM, SCALED_MM, rows, columns, contraction, recipe=each)) for each in recipes
    ]
    return min((timed for timed in found if timed is not None), key=lambda timed: timed.us, default=None)


def measured(costs: PartCosts, part: Part) -> PartTime | None:
    """A part's time if that very part was measured, else None."""
    timed = costs.time(part)
    return timed if timed is not None and timed.source is TimeSource.MEASURED else None


def total(parts: Iterable[PartTime | None]) -> PartTime | None:
    """The sum of times, None if one is missing; spreads are added as if fully correlated."""
    known: list[PartTime] = []
    for timed in parts:
        if timed is None:
            return None
        known.append(timed)
    us = sum(timed.us for timed in known)
    return PartTime(us, sum(timed.us * timed.spread for timed in known) / us, TimeSource.MEASURED) if us else None


def _gemms(view: CrossoverView, shape: Shape) -> tuple[tuple[Shape, tuple[str, ...]], ...]:
    """Rows, columns and contraction of each GEMM of a view, and the possible scalings of its operands.

    Operands quantized by row have one scale per row; transposed copies of both operands suit either kernel.
    """
    m, k, n = shape
    if view in (CrossoverView.GEMM, CrossoverView.FAST):
        return (((m, n, k), (_ROWS, _ONE)),)
    if view is CrossoverView.QUANTIZED:
        return (((m, n, k), (_ROWS,)),)
    return ((m, n, k), (_ROWS,)), ((m, k, n), (_ROWS,)), ((n, k, m), (_ROWS, _ONE))


def _producers(view: CrossoverView, shape: Shape) -> tuple[Part, ...]:
    """The parts that produce the operands of a view's GEMMs."""
    m, k, n = shape
    quantized = tuple(Part(PartKind.QUANTIZE, "rendered", *sizes, recipe=_ROWS) for sizes in ((m, k), (n, k)))
    if view in (CrossoverView.GEMM, CrossoverView.FAST):
        return ()
    if view is CrossoverView.QUANTIZED:
        return quantized
    transposed = tuple(
        Part(PartKind.REQUANTIZE_TRANSPOSE, "rendered", *sizes, recipe=_ONE) for sizes in ((m, k), (n, k), (m, n))
    )
    return (*quantized, Part(PartKind.QUANTIZE, "rendered", m, n, recipe=_ROWS), *transposed)


def to_markdown(found: Map, machine: str, source: str, sizes: Sequence[int] = SIZES) -> str:
    """The map as Markdown: the crossover points, then every ratio. `source` names the measurements."""
    parts = [
        "# Where FP8 wins over BF16",
        f"{machine}. {source}. Ratios are BF16's time over FP8's, sums of kernels that were each timed alone in CUDA "
        f"graphs; `{TIE}` marks a tie inside the spreads, `{NOTHING}` what was not measured.",
        "y = x @ weight.T, x of (M, K), weight of (N, K). The plot shows the same ratios.",
    ]
    for view in CrossoverView:
        parts += [f"## {TITLES[view]}", summary(found[view]), "The least M from which FP8 wins at every larger M:"]
        parts += [markdown_table(least_rows(found[view], sizes)), "All ratios, by K and N (rows) and M (columns):"]
        parts += [markdown_table(ratios(found[view], sizes))]
    return "\n\n".join(parts) + "\n"


def summary(view: dict[Shape, Ratio]) -> str:
    """Number of shapes that FP8 wins, loses and ties, and the range of ratios."""
    gains = sum(ratio.gains for ratio in view.values())
    ties = sum(ratio.tie for ratio in view.values())
    best = max((ratio.value for ratio in view.values()), default=0.0)
    least = min((ratio.value for ratio in view.values()), default=0.0)
    lost = len(view) - gains - ties
    return f"{len(view)} shapes: FP8 wins {gains}, loses {lost}, ties {ties}; from {least:.2f} to {best:.2f}."


def least_rows(view: dict[Shape, Ratio], sizes: Sequence[int]) -> Table:
    """By K (rows) and N (columns): the least M from which FP8 gains at every larger M."""
    lines = []
    for k in sizes:
        cells = []
        for n in sizes:
            column = [(m, view.get((m, k, n))) for m in sizes]
            least = ""
            for m, ratio in reversed(column):
                if ratio is None or not ratio.gains:
                    break
                least = str(m)
            cells.append(least or (NOTHING if any(ratio is None for _, ratio in column) else "never"))
        lines.append((f"K = {k}", *cells))
    return ("", *(f"N = {n}" for n in sizes)), lines


def ratios(view: dict[Shape, Ratio], sizes: Sequence[int]) -> Table:
    """Every ratio, a line for each K and N."""
    lines = [(str(k), str(n), *(_text(view.get((m, k, n))) for m in sizes)) for k in sizes for n in sizes]
    return ("K", "N", *(f"M = {m}" for m in sizes)), lines


def _text(ratio: Ratio | None) -> str:
    if ratio is None:
        return NOTHING
    return f"{TIE if ratio.tie else ''}{ratio.value:.2f}"
