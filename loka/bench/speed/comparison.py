"""Every variant on one piece of work, side by side; a failure is reported in its cell and the others go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from loka.bench.results import Cell
from loka.bench.speed.steps import MeasuredStep, StepWork, measure
from loka.bench.subjects.calibration import learned
from loka.bench.subjects.packages import BuiltPackage, Subject, Workshop
from loka.bench.subjects.variants import Variant

LONGEST_FAILURE = 300  # characters

Progress = Callable[[str], None]
Bound = Callable[[Variant, bool, BuiltPackage | None], float | None]  # (variant, training, package) -> microseconds


class Comparison:
    """One piece of work, the packages generated for it, and its bound."""

    def __init__(
        self,
        work: StepWork,
        subject: Subject,
        workshop: Workshop,
        bound: Bound,
        progress: Progress,
    ) -> None:
        self._work = work
        self._subject = subject
        self._workshop = workshop
        self._bound = bound
        self._progress = progress
        self._made: dict[str, BuiltPackage] = {}

    def cells(self, variants: Sequence[Variant], training: bool) -> tuple[Cell, ...]:
        """Measure each variant in one mode."""
        mode = "train" if training else "infer"
        return tuple(
            cell_of(
                f"{self._work.name} {mode}",
                self._work.name,
                variant.name,
                lambda variant=variant: self._measure(variant, training),  # type: ignore[misc]
                self._progress,
            )
            for variant in variants
        )

    def _measure(self, variant: Variant, training: bool) -> tuple[MeasuredStep, float | None]:
        made = self._package(variant) if variant.generated else None
        found = measure(self._work, variant, training, made.package if made is not None else None)
        return found, self._bound(variant, training, made)

    def _package(self, variant: Variant) -> BuiltPackage:
        if variant.name not in self._made:
            self._made[variant.name] = self._workshop.make(self._subject, variant, partial(learned, self._work))
        return self._made[variant.name]


def compare(
    name: str, make: Callable[[], Comparison], variants: Sequence[Variant], modes: Sequence[bool], progress: Progress
) -> dict[bool, tuple[Cell, ...]]:
    """The cells of one piece of work by mode (True: training); if `make` raises, each cell holds the failure."""
    try:
        comparison = make()
    except Exception as error:  # noqa: BLE001  (out of memory, or a device that an earlier variant has broken)
        failure = describe(error)
        progress(f"{name}: failed: {failure}")
        return {
            training: tuple(Cell(name, each.name, None, failure=failure) for each in variants) for training in modes
        }
    return {training: comparison.cells(variants, training) for training in modes}


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


def describe(error: BaseException) -> str:
    """Type and message of an error on one line of at most LONGEST_FAILURE characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= LONGEST_FAILURE else text[: LONGEST_FAILURE - 3] + "..."
