"""An open file of measurements as the Store of a recording."""

from __future__ import annotations

from dataclasses import dataclass

from loka.bench.record.check_numbers import Check
from loka.bench.record.clock import Span
from loka.kernels.measurements.lookup import Measurement, Recording
from loka.kernels.measurements.parts import Part


@dataclass(frozen=True, slots=True)
class RecordingStore:
    """A Store that writes into the file that planning reads."""

    recording: Recording

    def has(self, part: Part) -> bool:
        """True if the part was measured before with these versions."""
        return self.recording.has(part)

    def add(self, part: Part, span: Span, check: Check) -> None:
        """Write one measurement in its own transaction."""
        self.recording.add(Measurement(part, span.us, span.spread, span.runs, check.mere, check.sqnr_db, check.wrong))
