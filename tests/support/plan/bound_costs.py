"""Measurements in which every part takes its lower bound."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.region.region import Shape
from loka.bench.record.grid import DENSE_RECIPES, kinds
from loka.kernels.measurements.lookup import Measurement, Measurements, Versions
from loka.kernels.measurements.part_bounds import bound_us as part_us
from loka.kernels.measurements.parts import Part, PartKind

MACHINE = Versions("NVIDIA H100 80GB HBM3", "9.0", "580.65.06", "13.0", "13.1.1", "2.11.0", "3.6.0", "")
SHAPE = Shape(8192, 2048, 1024)


def known(fp8: float = 0.5, fast: float = 1.0, fbgemm: float = 0.0) -> Measurements:
    """Every part takes its bound, a GEMM in FP8 `fp8` of BF16's, with fast accumulation `fast` of that.

    Where `fbgemm` is not 0, FBGEMM takes that share of cuBLASLt's time, and twice that of wgrad.
    """
    parts = []
    for m, k, n in ((8192, 1024, 2048), (256, 20000, 64)):
        for sizes in ((m, n, k), (m, k, n), (n, k, m)):
            own = Part(PartKind.GEMM, "as-is", *sizes)
            parts.append((own, part_us(own)))
            for recipe in DENSE_RECIPES:
                part = Part(PartKind.GEMM, "torch.scaled_mm", *sizes, recipe=recipe)
                parts.append((part, part_us(own) * fp8 * (fast if "fast" in recipe else 1.0)))
                if fbgemm and "rowwise" in recipe:
                    share = fbgemm if sizes[2] != m else 2.0
                    parts.append((replace(part, kernel="fbgemm.rowwise"), share * parts[-1][1]))
        for rows, columns in ((m, k), (m, n), (n, k)):
            for work in (
                PartKind.QUANTIZE,
                PartKind.REQUANTIZE_TRANSPOSE,
                PartKind.FORWARD,
                PartKind.BACKWARD,
                PartKind.COPY,
            ):
                for recipe, around in kinds(work, 512):
                    part = Part(work, "rendered", rows, columns, recipe=recipe, around=around)
                    parts.append((part, part_us(part)))
    measured = {part: Measurement(part, us, 0.001, 9, None, None) for part, us in parts}
    return Measurements.of(measured.values(), MACHINE)
