"""Speed of FP8 GEMMs of libraries on operands that are already quantized, compared with BF16."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from loka.bench.cells import Errors, MeasuredStep, cell_of
from loka.bench.record.clock import copy_of
from loka.bench.record.gemm_parts import FBGEMM, NATIVE, SCALED_MM, Gemms, parse_recipe
from loka.bench.results import Section
from loka.bench.roofline import GemmMath, Peaks, product_us
from loka.bench.timing import Progress, rotations, size_of, time_call
from loka.kernels.measurements.parts import Part, PartKind

SHAPES = (  # M, N, K
    (2048, 128, 512),
    (2048, 512, 3456),
    (2048, 2048, 2048),
    (8192, 256, 256),
    (8192, 512, 512),
    (8192, 1024, 1024),
    (8192, 2048, 2048),
    (8192, 4096, 4096),
    (32768, 512, 3456),
    (32768, 1024, 1024),
)
BASELINE = "bf16"  # ratios are over this one
GEMMS: Mapping[str, tuple[str, str]] = {  # name -> kernel and recipe of a part; without a recipe in BF16
    BASELINE: (NATIVE, ""),
    "scaled-mm-tensorwise": (SCALED_MM, "e4m3 tensorwise, e4m3 tensorwise, precise"),
    "scaled-mm-tensorwise-fast": (SCALED_MM, "e4m3 tensorwise, e4m3 tensorwise, fast"),
    "scaled-mm-rowwise": (SCALED_MM, "e4m3 rowwise, e4m3 rowwise, precise"),
    "scaled-mm-rowwise-fast": (SCALED_MM, "e4m3 rowwise, e4m3 rowwise, fast"),
    "fbgemm-rowwise-fast": (FBGEMM, "e4m3 rowwise, e4m3 rowwise, fast"),
}
NAMES = tuple(GEMMS)
SHOWN = "scaled-mm-rowwise"  # its bound is printed beside the times


def run_gemms(names: Collection[str], peaks: Peaks | None, progress: Progress) -> Section:
    """Measure the GEMMs of these names on the current GPU, with operands that are not in the L2 cache."""
    gemms, cells = Gemms(), []
    for m, n, k in SHAPES:
        work = f"{m} x {n} x {k}"
        for name, (kernel, recipe) in GEMMS.items():
            if name in names:
                part = Part(PartKind.GEMM, kernel, m, n, k, recipe=recipe)
                cells.append(cell_of(work, work, name, lambda part=part: _measure(gemms, part, peaks), progress))  # type: ignore[misc]
                torch.cuda.empty_cache()
    return Section("GEMMs, operands already quantized (M x N x K)", tuple(cells), BASELINE, SHOWN)


def _measure(gemms: Gemms, part: Part, peaks: Peaks | None) -> tuple[MeasuredStep, float | None]:
    prepared = gemms.prepare(part)
    call, first = prepared.call, prepared.arguments
    errors = Errors(prepared.check(call(*first)).sqnr_db, None, "")
    sets = [first, *(copy_of(first) for _ in range(rotations(size_of(first)) - 1))]
    precision = GemmMath.BF16
    if part.recipe:
        precision = GemmMath.FP8_FAST if parse_recipe(part.recipe).fast else GemmMath.FP8
    bound = None if peaks is None else product_us(part.rows, part.columns, part.contraction, precision, peaks)
    return MeasuredStep(time_call(call, sets), None, errors), bound
