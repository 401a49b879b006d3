"""Every variant of every region, side by side; a failure is reported in its cell and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks.cell_report import Section
from benchmarks.cells import Cell, MeasuredStep, cell_of
from benchmarks.packages import BuiltPackage, StudyWorkshop, Subject
from benchmarks.region.region import Form, Shape, chain_of, subject, work_of
from benchmarks.region.region_bound import chain_us
from benchmarks.roofline import Peaks, peaks_of
from benchmarks.steps import StepWork, learned, measure
from benchmarks.variants import BASELINE, SHOWN, Variant
from loka.bench.device import describe
from loka.bench.timing import Progress

TITLES = {
    Form.LAYER_NORM: "LayerNorm -> Linear -> LayerNorm -> sigmoid",
    Form.BLOCK_NORM: "Linear -> BlockNorm -> Hard Swish -> Linear",
    Form.BATCH_NORM: "Linear -> BatchNorm -> ReLU -> Linear",
    Form.DROPOUT: "Linear -> BatchNorm -> ReLU -> Dropout -> Linear",
}
Bound = Callable[[Variant, bool], float | None]  # (variant, training) -> microseconds


@dataclass(frozen=True, slots=True)
class RegionComparison:
    """One piece of work, the packages made for it, and its bound."""

    work: StepWork
    subject: Subject
    workshop: StudyWorkshop
    bound: Bound
    progress: Progress
    made: dict[str, BuiltPackage] = field(default_factory=dict)

    def cells(self, variants: Sequence[Variant], training: bool) -> tuple[Cell, ...]:
        """Measure each variant in one mode."""
        label, name = f"{self.work.name} {'train' if training else 'infer'}", self.work.name
        return tuple(
            cell_of(label, name, variant.name, partial(self._measure, variant, training), self.progress)
            for variant in variants
        )

    def _measure(self, variant: Variant, training: bool) -> tuple[MeasuredStep, float | None]:
        package = self._package(variant).package if variant.generated else None
        return measure(self.work, variant, training, package), self.bound(variant, training)

    def _package(self, variant: Variant) -> BuiltPackage:
        if variant.name not in self.made:
            self.made[variant.name] = self.workshop.make(self.subject, variant, partial(learned, self.work))
        return self.made[variant.name]


def compare(
    name: str,
    make: Callable[[], RegionComparison],
    variants: Sequence[Variant],
    modes: Sequence[bool],
    progress: Progress,
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


def run_regions(
    form: Form, shapes: Sequence[Shape], variants: Sequence[Variant], modes: tuple[bool, ...], progress: Progress
) -> tuple[Section, ...]:
    """Measure every variant of every region in each mode (True: training) on the current GPU."""
    peaks = peaks_of(torch.cuda.get_device_name())
    with StudyWorkshop() as workshop:
        found = [
            compare(
                str(shape),
                partial(_comparison, form, shape, modes, workshop, peaks, progress),
                variants,
                modes,
                progress,
            )
            for shape in shapes
        ]
    return tuple(
        Section(
            f"{TITLES[form]}, {'forward and backward' if training else 'forward alone'} (M x N x K)",
            tuple(cell for cells in found for cell in cells[training]),
            BASELINE,
            SHOWN,
        )
        for training in modes
    )


def _comparison(
    form: Form,
    shape: Shape,
    modes: tuple[bool, ...],
    workshop: StudyWorkshop,
    peaks: Peaks | None,
    progress: Progress,
) -> RegionComparison:
    def bound(variant: Variant, training: bool) -> float | None:
        return None if peaks is None else chain_us(chain_of(form, shape), variant.precision, training, peaks)

    return RegionComparison(work_of(form, shape, modes), subject(form, shape), workshop, bound, progress)
