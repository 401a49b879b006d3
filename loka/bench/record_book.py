"""Measurements written down in the file that planning reads."""

from __future__ import annotations

from dataclasses import dataclass

from loka.bench.comparison import Progress
from loka.bench.machine import require_gpu
from loka.bench.record import Tally
from loka.bench.record_check import Check
from loka.bench.record_clock import Span
from loka.bench.record_run import Wanted, libraries, parts_of, run_record
from loka.kernels.measurements import Measurement, Recording, Versions
from loka.kernels.parts import Part


@dataclass(frozen=True, slots=True)
class FileBook:
    """A recording that is open, as a Book."""

    recording: Recording

    def has(self, part: Part) -> bool:
        """Whether the part was measured before, with these versions."""
        return self.recording.has(part)

    def add(self, part: Part, span: Span, check: Check) -> None:
        """In a transaction of its own."""
        self.recording.add(Measurement(part, span.us, span.spread, span.runs, check.mere, check.sqnr_db, check.wrong))


def record_into(wanted: Wanted, progress: Progress) -> Tally:
    """Measure what the file has not got. Raises InputError where it cannot be written, and without a Hopper GPU."""
    require_gpu()
    parts, known = parts_of(wanted), libraries()
    with Recording(wanted.file, lambda kernel: Versions.here(known.get(kernel, ""))) as recording:
        return run_record(wanted, FileBook(recording), parts, progress)
