"""Made-up measurements for tests. Times follow a formula: nothing of it was measured."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from loka.kernels.measurements.lookup import Measurement, Measurements, Recording, Versions
from loka.kernels.measurements.measurement import digest
from loka.kernels.measurements.parts import Part, PartKind

FP8 = "e4m3 rowwise, e4m3 rowwise, precise"
HOPPER = Versions("NVIDIA H100 80GB HBM3", "9.0", "575.57.08", "13.0", "13.0.2", "2.11.0+cu130", "3.6.0", "")
LATER = replace(HOPPER, driver="580.65.06")
SIZES = (64, 256, 1024, 4096)


def gemm(rows: int, columns: int, contraction: int, kernel: str = "torch.scaled_mm", recipe: str = FP8) -> Part:
    """A product."""
    return Part(PartKind.GEMM, kernel, rows, columns, contraction, recipe=recipe)


def quantize(rows: int, columns: int) -> Part:
    """A rowwise quantizer."""
    return Part(PartKind.QUANTIZE, "rendered", rows, columns, recipe="e4m3 rowwise")


def made_up_us(part: Part) -> float:
    """Grows with every size."""
    if part.work is PartKind.GEMM:
        return 2.5 + part.rows * part.columns * part.contraction / 350e6
    return 2.0 + part.rows * part.columns / 800e3


def measurement(part: Part, us: float | None = None, wrong: str = "", mere: float | None = None) -> Measurement:
    """Of a part, at the made-up time unless another is given."""
    is_gemm = part.work is PartKind.GEMM
    error = 0.026 if mere is None else mere
    return Measurement(
        part=part,
        us=made_up_us(part) if us is None else us,
        spread=0.01,
        runs=20,
        mere=error if is_gemm else None,
        sqnr_db=31.5 if is_gemm else None,
        wrong=wrong,
    )


def grid(sizes: Iterable[int] = SIZES, kernel: str = "torch.scaled_mm") -> Iterator[Measurement]:
    """Every product of these sizes."""
    for rows, columns, contraction in itertools.product(sizes, repeat=3):
        yield measurement(gemm(rows, columns, contraction, kernel))


def passes(widths: Iterable[int] = SIZES, rows: Iterable[int] = (512, 2048, 8192)) -> Iterator[Measurement]:
    """Quantizers of these widths."""
    for width, height in itertools.product(widths, rows):
        yield measurement(quantize(height, width))


def measured(*more: Measurement) -> Measurements:
    """The grid and the passes, and more."""
    return Measurements.of([*grid(), *passes(), *more], HOPPER)


def record(
    path: Path,
    measurements: Iterable[Measurement],
    machine: Versions = HOPPER,
    libraries: Mapping[str, str] | None = None,
) -> Path:
    """Write measurements to a file, in a recording that comes to its end."""
    with Recording(path, machine, libraries) as recording:
        for each in measurements:
            recording.add(each)
    return path


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the lines of a recording as if it had been recorded so: its checksums fit. None drops a line."""
    head, *lines = path.read_text().splitlines()
    kept: list[str] = []
    for line in lines:
        row = change(json.loads(line))
        if isinstance(row, dict) and "sha256" in row:
            row = {**row, "sha256": digest(kept)}
        if row is not None:
            kept.append(json.dumps(row))
    path.write_text("\n".join([head, *kept, ""]))
