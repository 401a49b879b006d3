"""Our own matrix product in Triton (`gemm_specs`), as a candidate: measured, and not called by generated packages yet.

Its text has K and N in it, so that it would be rendered into each package and count itself there, as operators of
`gemm_operator` do; what is rendered today has no number to count under.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loka.kernels.gemm.gemm_kernel import BFLOAT16, check_target, refuse_range
from loka.kernels.gemm.gpu_here import unsupported_device
from loka.numerics.enums import Accumulation, Format, Gemm, Scaling

if TYPE_CHECKING:
    from loka.policy.cascade.settings import OperandRecipe

NOT_GENERATED = (
    "not generated yet: what is rendered does not count itself, so that `verify` could not prove that it ran"
)


@dataclass(frozen=True, slots=True)
class TritonGemm:
    """`gemm_specs.Gemm`, and `gemm_specs.SplitGemm` where M is contracted over."""

    name: str = "triton.gemm"
    operator: None = None
    library: None = None

    def unsupported_reason(
        self,
        gemm: Gemm,
        operands: tuple[OperandRecipe, OperandRecipe],
        accumulation: Accumulation,
        padding: bool,
        m: int,
        k: int,
        n: int,
        target: str,
        dtype: str = BFLOAT16,
    ) -> str | None:
        """e4m3 with rowwise or tensorwise scales, any size; what it could run, it does not run yet."""
        check_target(target)
        refusal = refuse_range(gemm, operands)
        if refusal is not None:
            return refusal
        for recipe in operands:
            if recipe.format is not Format.E4M3:
                return f"a rendered product takes e4m3, not {recipe.format.value}"
            if recipe.scaling not in (Scaling.ROWWISE, Scaling.TENSORWISE):
                return f"a rendered product takes rowwise and tensorwise scales, not {recipe.scaling.value}"
        return NOT_GENERATED

    def unavailable_reason(self) -> str | None:
        """It needs a Hopper GPU; Triton comes with torch there."""
        return unsupported_device((9, 0))


TRITON_GEMM = TritonGemm()
