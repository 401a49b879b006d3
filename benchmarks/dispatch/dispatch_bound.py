"""Lower bound of a region's time: its bytes at the bandwidth of a copy, plus the best measured GEMM for each.

The lesser of BF16 and FP8: the passes between the GEMMs as in `roofline`, and for each of fprop, dgrad and wgrad the
least time over all kernels, scalings and accumulations.
"""

from __future__ import annotations

from benchmarks.dispatch.dispatch_cases import GEMMS, LIBRARIES, gemm_part
from benchmarks.region.region import Form, Shape, chain_of
from benchmarks.region.region_bound import chain_backward_bytes, chain_forward_bytes
from benchmarks.roofline import GemmMath, Peaks, bytes_us
from loka.bench.record.gemm_parts import NATIVE
from loka.kernels.measurements.parts import PartCosts
from loka.numerics.enums import Accumulation, Gemm

SCALINGS = ("rowwise", "tensorwise")


def bound_us(shape: Shape, costs: PartCosts, peaks: Peaks) -> float | None:
    """Microseconds of a training step; None if not all three GEMMs were measured in one precision."""
    chain = chain_of(Form.LAYER_NORM, shape)
    bounds = []
    for precision in (GemmMath.BF16, GemmMath.FP8):
        passes = chain_forward_bytes(chain, precision, True) + chain_backward_bytes(chain, precision)
        products = [best_gemm_us(shape, gemm, precision, costs) for gemm in GEMMS]
        known = [us for us in products if us is not None]
        if len(known) == len(GEMMS):
            bounds.append(bytes_us(passes, peaks) + sum(known))
    return min(bounds, default=None)


def best_gemm_us(shape: Shape, gemm: Gemm, precision: GemmMath, costs: PartCosts) -> float | None:
    """Least time of one GEMM in microseconds, without making its operands."""
    if precision is GemmMath.BF16:
        timed = costs.time(gemm_part(shape, gemm, NATIVE))
        return None if timed is None else timed.us
    recipes = [f"e4m3 {each}, e4m3 {each}, {how.value}" for each in SCALINGS for how in Accumulation]
    found = (costs.time(gemm_part(shape, gemm, kernel, recipe)) for kernel in LIBRARIES.values() for recipe in recipes)
    return min((timed.us for timed in found if timed is not None), default=None)
