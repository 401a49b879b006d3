"""Cells of a comparison: every variant on one piece of work; a failure is reported in its cell and the others go on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from benchmarks.replays import Timing
from loka.bench.device import describe
from loka.bench.timing import Progress


@dataclass(frozen=True, slots=True)
class Errors:
    """Signal to error against float32 in dB; None if the signal is zero, not finite, or was not compared."""

    output: float | None
    gradient: float | None  # the worst of all gradients
    gradient_of: str  # name of the tensor with that gradient; "" if there is none


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Measurements of one variant."""

    timing: Timing
    peak_mib: float | None
    errors: Errors | None


@dataclass(frozen=True, slots=True)
class Cell:
    """Result of one variant on one piece of work."""

    work: str
    variant: str
    timing: Timing | None  # None if it failed
    bound_us: float | None = None  # None if no bound is known
    peak_mib: float | None = None  # of a training step: memory of the variant itself
    errors: Errors | None = None
    failure: str = ""

    @property
    def reached(self) -> float | None:
        """Lower bound over measured time: 1 is the roofline."""
        if self.timing is None or self.bound_us is None:
            return None
        return self.bound_us / self.timing.median_us


def cell_of(
    label: str, work: str, variant: str, run: Callable[[], tuple[MeasuredStep, float | None]], progress: Progress
) -> Cell:
    """The measurement and the bound that `run` returns, as a cell; any exception becomes the cell's failure."""
    start = time.perf_counter()
    try:
        found, bound = run()
    except Exception as error:  # noqa: BLE001  (libraries, compiler and device may raise anything: it is reported)
        failure = describe(error)
        progress(f"{label} {variant}: failed: {failure}")
        return Cell(work, variant, None, failure=failure)
    progress(f"{label} {variant}: {_words(found)}, in {time.perf_counter() - start:.0f} s")
    return Cell(work, variant, found.timing, bound, found.peak_mib, found.errors)


def _words(found: MeasuredStep) -> str:
    """The measurement in a line of progress, so that an interrupted run has still reported it."""
    timing, errors = found.timing, found.errors
    words = f"{timing.median_us:.1f} us ({timing.p10_us:.1f} to {timing.p90_us:.1f})"
    if found.peak_mib is not None:
        words += f", peak {found.peak_mib:.0f} MiB"
    shown = [value for value in (errors.output, errors.gradient) if value is not None] if errors is not None else []
    return words + (f", {' and '.join(f'{value:.1f}' for value in shown)} dB" if shown else "")


def decibels(found: Tensor, expected: Tensor) -> float | None:
    """10 log10 of the energy of `expected` over that of the difference; None if not finite or without signal."""
    signal = float(expected.double().square().sum())
    noise = float((found.double() - expected.double()).square().sum())
    if not signal or not math.isfinite(signal) or not math.isfinite(noise):
        return None
    return 10 * math.log10(signal / max(noise, 1e-30 * signal))
