"""Measurements written down in the file that planning reads."""

from __future__ import annotations

from dataclasses import dataclass

from loka.bench.record.check_numbers import Check
from loka.bench.record.clock import Span
from loka.kernels.measurements.lookup import Measurement, Recording
from loka.kernels.measurements.parts import Part


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
