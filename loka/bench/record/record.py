"""Record parts one after another; each result is stored at once, so a run may be stopped at any time.

A part that was measured before with the same versions is skipped. A kernel with wrong results is stored with the
reason, so that it is never chosen. A part that cannot run is reported and not stored; the others go on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from loka.bench.device import describe
from loka.bench.machine import device_here
from loka.bench.record.check_numbers import Check
from loka.bench.record.clock import Span, Timer
from loka.bench.record.gemm_parts import Gemms, PreparedCall, size_key
from loka.bench.record.interaction_parts import InteractionParts
from loka.bench.record.producer_parts import Producers
from loka.bench.timing import Progress
from loka.errors import InputError, LokaError
from loka.kernels.measurements.interaction_forms import family
from loka.kernels.measurements.lookup import Recording
from loka.kernels.measurements.measurement import Measurement
from loka.kernels.measurements.parts import INTERACTIONS, Part, PartKind

Prepare = Callable[[Part], PreparedCall]

RESTLESS = 0.03  # spread above which a time is measured again; the one with less spread counts
_BROKEN = ("illegal memory access", "unspecified launch failure", "device-side assert", "misaligned address")


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of a run over a list of parts."""

    measured: int
    known: int  # measured before
    wrong: int  # measured, but with wrong results
    failed: int

    def __str__(self) -> str:
        measured = f"{self.measured} measured ({self.wrong} with wrong numbers)"
        return f"{measured}, {self.known} known before, {self.failed} could not run"


def all_parts(module: ModuleType) -> Prepare:
    """Prepares parts of every kind: GEMMs, producers and interactions, of which `module` has the rendered kernels."""
    gemms, producers, interactions = Gemms(target=device_here().name), Producers(module), InteractionParts(module)

    def prepare(part: Part) -> PreparedCall:
        if part.work in INTERACTIONS:
            return interactions.prepare(part)
        return gemms.prepare(part) if part.work is PartKind.GEMM else producers.prepare(part)

    return prepare


def record(
    parts: Iterable[Part],
    store: Recording,
    prepare: Prepare,
    timer: Timer,
    progress: Progress,
    seconds: float = math.inf,
) -> Tally:
    """Measure each part that is missing from the store, for `seconds` at most, with a line of progress for each.

    Raises LokaError if a kernel has broken the device: nothing more can be measured in this process.
    """
    wanted = in_order(parts)
    end = time.monotonic() + seconds
    measured = known = wrong = failed = 0
    for number, part in enumerate(wanted, 1):
        if store.has(part):
            known += 1
            continue
        if time.monotonic() > end:
            progress(f"{seconds:g} s are over; {len(wanted) - number + 1} parts are left for the next run")
            break
        label = f"{number}/{len(wanted)} {part_label(part)}"
        try:
            span, check = measure(part, prepare, timer)
        except Exception as error:  # libraries, compilers and the device raise anything
            failed += 1
            progress(f"{label}: {describe(error)}")
            if any(text in str(error) for text in _BROKEN):
                raise LokaError(
                    f"{part_label(part)} has broken the device ({describe(error)}); what was measured is kept, run it "
                    "again without this kernel"
                ) from error
            continue
        store.add(Measurement(part, span.us, span.spread, span.runs, check.mere, check.sqnr_db, check.wrong))
        measured += 1
        wrong += bool(check.wrong)
        progress(f"{label}: {format_result(span, check)}")
    return Tally(measured, known, wrong, failed)


def measure(part: Part, prepare: Prepare, timer: Timer) -> tuple[Span, Check]:
    """Check a part's results, then time it.

    Errors of the kernel propagate.
    """
    prepared = prepare(part)
    check = prepared.check(prepared.call(*prepared.arguments))
    span = _calmer(prepared.call, prepared, timer)
    if prepared.less is not None:
        span = _difference(span, _calmer(prepared.less, prepared, timer))
    return replace(span, us=span.us / prepared.parts), check


def _calmer(call: Callable[..., Any], prepared: PreparedCall, timer: Timer) -> Span:
    """A call's time; above RESTLESS it is measured twice."""
    span = timer(call, prepared.arguments)
    if span.spread > RESTLESS:
        span = min(span, timer(call, prepared.arguments), key=lambda each: each.spread)
    return span


def _difference(whole: Span, less: Span) -> Span:
    """Difference of two times. Raises InputError unless it is positive."""
    us = whole.us - less.us
    if us <= 0:
        raise InputError(f"a step took {whole.us:.2f} us and its forward alone {less.us:.2f}; measure it again")
    spread = math.hypot(whole.us * whole.spread, less.us * less.spread) / us
    return Span(us, spread, min(whole.runs, less.runs))


def in_order(parts: Iterable[Part]) -> Sequence[Part]:
    """The parts once each: GEMMs first, grouped by size, small ones first; a backward next to its forward."""
    once = dict.fromkeys(parts)
    return sorted(once, key=_place)


def _place(part: Part) -> tuple[object, ...]:
    kind = (part.around, part.kernel) if part.work in INTERACTIONS else ()
    return part.work is not PartKind.GEMM, family(part.work), part.dtype, _size(part), kind, part


def part_label(part: Part) -> str:
    """Name of a part in a line of progress."""
    size = f"{part.rows} x {part.columns}" + (f" x {part.contraction}" if part.work is PartKind.GEMM else "")
    return " ".join(text for text in (part.work.value, part.kernel, size, part.dtype, part.recipe, part.around) if text)


def format_result(span: Span, check: Check) -> str:
    """A time and its errors in a line of progress."""
    text = f"{span.us:.2f} us (spread {span.spread:.1%}, {span.runs})"
    if check.sqnr_db is not None:
        text += f", MERE {check.mere:.4f}, {check.sqnr_db:.1f} dB"
    return text + (f", WRONG: {check.wrong}" if check.wrong else "")


def _size(part: Part) -> tuple[object, ...]:
    rows, columns, contraction, _ = size_key(part)
    return rows * columns * max(contraction, 1), rows, columns, contraction
