"""Recordings whose times are made up: for tests of what reads them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from loka.bench.record.check_numbers import Check
from loka.bench.record.clock import Span
from loka.bench.record.gemm_parts import PreparedCall
from loka.bench.record.grid import grid
from loka.bench.record.record import record
from loka.kernels.measurements.lookup import Recording, Versions
from loka.kernels.measurements.parts import Part, PartKind

MACHINE = Versions("NVIDIA H100 80GB HBM3", "9.0", "580.65.06", "13.0", "13.1.1", "2.11.0", "3.6.0", "")


def made(part: Part) -> PreparedCall:
    """Each part takes a microsecond for each million of elements, and one more; in FP8 half of it."""
    size = part.rows * part.columns * max(part.contraction, 1)
    share = 0.5 if part.recipe else 1.0
    errors = (0.17, 28.5) if part.work is PartKind.GEMM else (None, None)
    return PreparedCall(lambda: 1.0 + share * size / 1e6, (), lambda found: Check(*errors))


def fill(path: Path, parts: Iterable[Part], factor: float = 1.0) -> list[str]:
    """Record parts, times multiplied by a factor; gives the lines of progress."""
    lines: list[str] = []
    with Recording(path, MACHINE) as recording:
        record(parts, recording, made, lambda call, arguments: Span(factor * call(), 0.01, 9), lines.append)
    return lines


def small_recording(path: Path) -> Path:
    """A file with the GEMMs, quantizations and transpositions of the grid up to 512."""
    parts = grid(("gemm", "quantize", "turn"))
    fill(path, [part for part in parts if max(part.rows, part.columns, part.contraction) <= 512])
    return path
