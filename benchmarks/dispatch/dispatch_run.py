"""Measurement of the plans of regions, a line of JSON for each, so that an interrupted run can continue.

The time is that of one training step: forward, and backward to the input and all weights, from a CUDA graph. Equal
plans are measured once. A plan of only rendered kernels and GEMMs is captured directly; others, and the model in BF16,
have torch operations and are compiled first, which takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.dispatch.dispatch_bound import bound_us
from benchmarks.dispatch.dispatch_cases import (
    COMPILED,
    TORCHAO,
    DecidedRegion,
    decisions,
    format_gemm,
    is_rendered,
    recorded_variants,
)
from benchmarks.packages import StudyWorkshop
from benchmarks.region.region import Form, Shape, work_of
from benchmarks.roofline import GemmMath, peaks_of
from benchmarks.steps import StepWork, measure
from benchmarks.variants import Variant
from loka.bench.device import describe
from loka.bench.timing import Progress
from loka.errors import InputError, LokaError
from loka.kernels.measurements.lookup import Measurements

AS_COMPILED = "the model as it is, compiled"  # runs if nothing is replaced


@dataclass(frozen=True, slots=True)
class Line:
    """One variant on one region. Times are of a training step in microseconds."""

    m: int
    k: int
    n: int
    variant: str
    runs: str  # its GEMMs in words; AS_COMPILED if nothing is replaced
    us: float | None  # None if it failed
    p10: float | None
    p90: float | None
    predicted_us: float | None  # sum of the measured parts; None if not planned by measurements
    bound_us: float | None  # of the region
    output_db: float | None  # signal to error against float32
    gradient_db: float | None  # the worst gradient's
    failure: str = ""

    @property
    def shape(self) -> Shape:
        """Shape of its region."""
        return Shape(self.m, self.n, self.k)


def run_dispatch(
    file: Path,
    costs: Measurements,
    shapes: Sequence[Shape],
    variants: Sequence[str],
    progress: Progress,
    out_of_time: Callable[[], bool],
) -> list[Line]:
    """Measure what is missing from the file of lines; returns all lines. Raises InputError for a damaged file."""
    lines = read_lines(file)
    possible = recorded_variants(costs)
    variants = tuple(name for name in variants if name in possible)
    peaks = peaks_of(torch.cuda.get_device_name())
    with StudyWorkshop() as workshop, file.open("a", encoding="utf-8") as writing:
        for shape in shapes:
            if set(variants) <= measured_variants(lines, shape):
                continue
            if out_of_time():
                progress(f"no time is left for {shape} and what follows; run it again")
                break
            bound = bound_us(shape, costs, peaks) if peaks is not None else None
            for line in measured_lines(shape, costs, variants, lines, workshop, progress):
                kept = replace(line, bound_us=bound)
                lines.append(kept)
                writing.write(json.dumps(asdict(kept)) + "\n")
                writing.flush()
            torch.cuda.empty_cache()
    return lines


def measured_variants(lines: Sequence[Line], shape: Shape) -> set[str]:
    """The measured variants of a region; failed ones are tried again by the next run."""
    return {line.variant for line in lines if line.shape == shape and line.us is not None}


def measured_lines(
    shape: Shape,
    costs: Measurements,
    variants: Sequence[str],
    known: Sequence[Line],
    workshop: StudyWorkshop,
    progress: Progress,
) -> Iterator[Line]:
    """Measure the missing lines of a region; equal plans share a measurement."""
    by_runs = {line.runs: line for line in known if line.shape == shape and line.us is not None}
    there = measured_variants(known, shape)
    try:
        found = decisions(shape, workshop, costs)
        work = work_of(Form.LAYER_NORM, shape, (True,))
    except Exception as error:  # noqa: BLE001  (of the planner, or out of memory: reported for each variant)
        progress(f"{shape}: {describe(error)}")
        yield from (_failed(shape, variant, "", describe(error)) for variant in variants if variant not in there)
        return
    for variant in (COMPILED, *TORCHAO, *found):
        if variant not in variants or variant in there:
            continue
        decided = found.get(variant)
        runs = decided.runs if decided is not None else variant if variant in TORCHAO else AS_COMPILED
        if runs not in by_runs:
            line = _measured(shape, variant, runs, decided, work, workshop)
            progress(f"{shape} {variant} ({runs}): {line.failure or f'{line.us:.1f} us'}")
            if line.us is None:
                yield line
                continue
            by_runs[runs] = line
        predicted = decided.predicted_us if decided is not None else None
        finite = predicted if predicted is not None and predicted < float("inf") else None
        yield replace(by_runs[runs], variant=variant, predicted_us=finite)


def _measured(
    shape: Shape, variant: str, runs: str, decided: DecidedRegion | None, work: StepWork, workshop: StudyWorkshop
) -> Line:
    """Measure one plan or the unpatched model; an exception becomes the line's failure."""
    try:
        plan = decided.plan() if decided is not None else None
        if plan is not None and format_gemm(plan.sites) != runs:
            raise LokaError(f"traced, it is planned otherwise: {format_gemm(plan.sites)}")
        if variant in TORCHAO:
            found = measure(work, Variant(variant, GemmMath.FP8_FAST, torchao=TORCHAO[variant]), True, None)
        elif plan is None or not plan.bindings:  # nothing is replaced
            found = measure(work, Variant(variant, GemmMath.BF16), True, None)
        else:
            package = workshop.package(replace(plan, name=f"{plan.name}_{variant.replace('-', '_')}"))
            made = Variant(variant, GemmMath.BF16, defaults=runs)
            found = measure(work, made, True, package, compiled=not is_rendered(plan))
    except Exception as error:  # noqa: BLE001  (planner, compiler and device may raise anything: it is reported)
        return _failed(shape, variant, runs, describe(error))
    timing, errors = found.timing, found.errors
    output, gradient = (errors.output, errors.gradient) if errors is not None else (None, None)
    times = (timing.median_us, timing.p10_us, timing.p90_us)
    return Line(shape.m, shape.k, shape.n, variant, runs, *times, None, None, output, gradient)


def _failed(shape: Shape, variant: str, runs: str, failure: str) -> Line:
    return Line(shape.m, shape.k, shape.n, variant, runs, None, None, None, None, None, None, None, failure)


def read_lines(file: Path) -> list[Line]:
    """The lines of a file; none if it does not exist. Raises InputError, with file and line, for an invalid line."""
    if not file.exists():
        return []
    found = []
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            fields: dict[str, Any] = json.loads(text)
            found.append(Line(**fields))
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{file}:{number}: no line of `python -m benchmarks.dispatch` ({error}); take it out"
            ) from error
    return found
