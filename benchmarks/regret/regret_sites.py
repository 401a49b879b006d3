"""Regret of whole sites: LayerNorm, SiLU -> Linear -> LayerNorm, SiLU, with every option that the resolver compares.

A site's candidates are the sets of its GEMMs in FP8 that can run together, each GEMM on each kernel, with the work that
makes the operands (`loka.plan.select.workload`), all with one accumulation; the last is native.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from benchmarks.regret.regret import RegretProblem
from loka.bench.record.gemm_parts import NATIVE, SCALED_MM
from loka.kernels.measurements.parts import Part
from loka.numerics.enums import Accumulation, Gemm, Scaling
from loka.numerics.recipe import OperandPair, OperandRecipe, Recipe
from loka.plan.select.workload import RENDERED, SiteSizes, Surroundings, gemm_part, native_part, workload_of

ROWS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
SIDES = (256, 512, 1024, 2048, 4096)
AROUND = Surroundings("layer_norm", "layer_norm silu")
_ROWS = OperandRecipe(power_of_two=True)
_TRANSPOSED = OperandRecipe(power_of_two=True, transposed=True)
_TRANSPOSED_TENSORWISE = OperandRecipe(scaling=Scaling.TENSORWISE, power_of_two=True, transposed=True)
PAIRS: dict[Gemm, OperandPair] = {
    Gemm.FPROP: (_ROWS, _ROWS),
    Gemm.DGRAD: (_ROWS, _TRANSPOSED),
    Gemm.WGRAD: (_TRANSPOSED_TENSORWISE, _TRANSPOSED_TENSORWISE),
}
SETS = (  # sets of FP8 GEMMs: each includes the sources of its transposed operands
    (Gemm.FPROP, Gemm.DGRAD, Gemm.WGRAD),
    (Gemm.FPROP, Gemm.DGRAD),
    (Gemm.FPROP,),
    (),
)


def site_problems(
    kernels: Sequence[str] = (SCALED_MM,), how: Accumulation = Accumulation.PRECISE
) -> Iterator[RegretProblem]:
    """A problem for each size; `kernels`: of rowwise GEMMs, in order; wgrad always runs on cuBLASLt."""
    for m, k, n in product(ROWS, SIDES, SIDES):
        yield RegretProblem(f"{m} x {k} x {n}", candidates(SiteSizes(m, k, n), kernels, how))


def candidates(sizes: SiteSizes, kernels: Sequence[str], how: Accumulation) -> dict[str, tuple[Part, ...]]:
    """All execution options of a site, by name."""
    found: dict[str, tuple[Part, ...]] = {}
    for fp8 in SETS:
        recipe = Recipe.of({gemm: PAIRS[gemm] if gemm in fp8 else None for gemm in Gemm})
        workload = workload_of(sizes, recipe, AROUND, fused=True, joined=False)
        options = [_options(gemm, gemm in fp8, kernels) for gemm in Gemm]
        for chosen in product(*options):
            gemms = [
                native_part(gemm, sizes) if kernel == NATIVE else gemm_part(gemm, sizes, kernel, PAIRS[gemm], how)
                for gemm, kernel in zip(Gemm, chosen, strict=True)
            ]
            name = ", ".join(f"{gemm.value} {kernel}" for gemm, kernel in zip(Gemm, chosen, strict=True))
            around = (replace(part, kernel=RENDERED) for part in (*workload.forward, *workload.backward))
            found[name] = (*around, *gemms)  # compiled norms are not recorded
    return found


def _options(gemm: Gemm, fp8: bool, kernels: Sequence[str]) -> Sequence[str]:
    if not fp8:
        return (NATIVE,)
    return (SCALED_MM,) if gemm is Gemm.WGRAD else kernels
