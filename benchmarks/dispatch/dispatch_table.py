"""Tables of the study, with the means that Dispatch is judged by."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.dispatch.dispatch_cases import COMPILED, DISPATCH, FUSED, SHAPES, SINGLES, TORCHAO
from benchmarks.dispatch.dispatch_run import Line
from benchmarks.region.region import Shape
from loka.bench.markdown import Table, markdown_table
from loka.bench.results import NOTHING

USUAL = (COMPILED, FUSED, *SINGLES, DISPATCH)  # measured by default
VARIANTS = (COMPILED, *TORCHAO, FUSED, *SINGLES, DISPATCH)


def to_markdown(lines: Sequence[Line], machine: str, source: str) -> str:
    """The page: times of all variants on all regions, then means over the regions that all variants have."""
    names = variants_of(lines)
    parts = [
        "# Dispatch on 27 regions",
        f"{machine}. {source}.",
        "LayerNorm -> Linear -> LayerNorm -> sigmoid, forward and backward, microseconds a step. `bound`: bytes at the "
        "speed of a copy, and the best measured GEMM for each of the three.",
        markdown_table(times(lines, names)),
        markdown_table(means(lines, names)),
        best_words(lines, names),
        "What Dispatch chose:",
        markdown_table(choices(lines)),
    ]
    timed = {(line.shape, line.variant) for line in lines if line.us is not None}
    failed = {(line.shape, line.variant): line.failure for line in lines if line.failure}
    failures = [f"- {shape} {name}: {why}" for (shape, name), why in failed.items() if (shape, name) not in timed]
    return "\n\n".join([*parts, *(["Failed:\n\n" + "\n".join(failures)] if failures else [])]) + "\n"


def variants_of(lines: Sequence[Line]) -> tuple[str, ...]:
    """The measured variants, in order."""
    there = {line.variant for line in lines if line.us is not None}
    return tuple(name for name in VARIANTS if name in there)


def shapes_of(lines: Sequence[Line]) -> list[Shape]:
    """The shapes with lines: first those of the 27, in order, then others by first occurrence."""
    there = dict.fromkeys(line.shape for line in lines)
    return [*(shape for shape in SHAPES if shape in there), *(shape for shape in there if shape not in SHAPES)]


def times(lines: Sequence[Line], names: Sequence[str]) -> Table:
    """A line for each region: times, the bound, and the share of it that Dispatch reaches."""
    found = {(line.shape, line.variant): line for line in lines if line.us is not None}
    rows = []
    for shape in shapes_of(lines):
        cells = [found.get((shape, name)) for name in names]
        bound = next((cell.bound_us for cell in cells if cell is not None and cell.bound_us is not None), None)
        dispatch = _us(found.get((shape, DISPATCH)))
        reached = f"{100 * bound / dispatch:.0f} %" if bound is not None and dispatch is not None else NOTHING
        known = [f"{us:.1f}" if (us := _us(cell)) is not None else NOTHING for cell in cells]
        size = f"{shape.m}, {shape.k}, {shape.n}"
        rows.append((size, *known, f"{bound:.1f}" if bound is not None else NOTHING, reached))
    return ("M, K, N", *names, "bound", "reached"), rows


def means(lines: Sequence[Line], names: Sequence[str]) -> Table:
    """Geometric means over regions that all variants have: speedup over compiled BF16, and share of the bound."""
    whole = complete(lines, names)
    rows: list[tuple[str, ...]] = []
    for name in names:
        over = geometric_mean(
            [whole[shape][COMPILED] / each[name] for shape, each in whole.items() if COMPILED in each]
        )
        bounds = {line.shape: line.bound_us for line in lines if line.bound_us is not None}
        reached = geometric_mean([bounds[shape] / each[name] for shape, each in whole.items() if shape in bounds])
        rows.append((name, str(len(whole)), _number(over, "x"), _number(reached, "")))
    return ("variant", "regions", f"over {COMPILED}", "share of the bound"), rows


def best_words(lines: Sequence[Line], names: Sequence[str]) -> str:
    """Speedup of Dispatch over the single library that is best over all regions, in words."""
    whole = complete(lines, names)
    singles = [name for name in names if name in (*SINGLES, *TORCHAO)]
    if not whole or not singles or DISPATCH not in names:
        return "No single library to compare with."
    ratios = {name: geometric_mean([each[name] / each[DISPATCH] for each in whole.values()]) for name in singles}
    best = min(singles, key=lambda name: ratios[name] or math.inf)
    return f"Dispatch over the best single library, {best}: {_number(ratios[best], 'x')} in geometric mean."


def complete(lines: Sequence[Line], names: Sequence[str]) -> dict[Shape, dict[str, float]]:
    """The times of the regions that all variants have; torchao's is at most BF16's."""
    found: dict[Shape, dict[str, float]] = {}
    for line in lines:
        if line.us is not None:
            found.setdefault(line.shape, {})[line.variant] = line.us
    whole = {shape: each for shape, each in found.items() if set(names) <= set(each)}
    for each in whole.values():
        for name in TORCHAO:
            if name in each and COMPILED in each:
                each[name] = min(each[name], each[COMPILED])
    return whole


def choices(lines: Sequence[Line]) -> Table:
    """The GEMMs that Dispatch runs on each region, with the sum of measured parts and the measured time."""
    rows: list[tuple[str, ...]] = [
        (
            f"{line.m}, {line.k}, {line.n}",
            line.runs,
            f"{line.predicted_us:.1f}" if line.predicted_us is not None else NOTHING,
            f"{line.us:.1f}" if line.us is not None else NOTHING,
        )
        for shape in shapes_of(lines)
        for line in lines
        if line.variant == DISPATCH and line.shape == shape
    ]
    return ("M, K, N", "GEMMs", "sum of parts", "measured"), rows


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """Geometric mean; None if empty."""
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None


def _us(line: Line | None) -> float | None:
    return line.us if line is not None else None


def _number(value: float | None, unit: str) -> str:
    return NOTHING if value is None else f"{value:.3f}{unit}"
