"""What torch itself has: cuBLASLt's FP8 GEMMs behind `loka::scaled_mm`, and the GEMM that the model has anyway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loka.kernels import limits, scaled_mm
from loka.kernels.devices import FP8_CAPABILITY, why_no_device
from loka.kernels.kernel import (
    BFLOAT16,
    REFERENCE_TARGET,
    GemmSizes,
    check_target,
    gemm_sizes,
    refuse_range,
    refuse_sizes,
)
from loka.numerics.names import Accumulation, Gemm

if TYPE_CHECKING:
    from loka.policy.settings import OperandRecipe


@dataclass(frozen=True, slots=True)
class ScaledMM:
    """The operator `loka::scaled_mm`: tensorwise, rowwise and blockwise scales, both accumulations, every dtype."""

    name: str = scaled_mm.KERNEL
    operator: str = "loka::scaled_mm"
    library: None = None

    def why_not(
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
        """The reference takes every recipe and size; Hopper's kernel what `kernels.limits` says."""
        check_target(target)
        refusal = refuse_range(gemm, operands)
        if refusal is not None or target == REFERENCE_TARGET:
            return refusal
        first, second = operands
        refusal = limits.refuse_recipe((first.scaling, second.scaling), (first.format, second.format), accumulation)
        if refusal is None and not padding:
            multiples = GemmSizes(limits.row_alignment(first.scaling), limits.ALIGNMENT, limits.ALIGNMENT)
            refusal = refuse_sizes(gemm, gemm_sizes(gemm, m, k, n), multiples)
        return refusal

    def why_not_here(self) -> str | None:
        """Without an FP8 GPU the operator runs as well, by its reference: slow, and no kernel."""
        refusal = why_no_device(FP8_CAPABILITY)
        return None if refusal is None else f"{refusal}; its reference runs"


@dataclass(frozen=True, slots=True)
class AsIs:
    """The model's own GEMM, in the model's own precision: BF16, or float32, for which torch may use TF32.

    `torch.backends.cuda.matmul.allow_tf32` and autocast decide which; a plan leaves both alone.
    """

    name: str = "as-is"
    operator: None = None
    library: None = None

    def why_not(
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
        """What the model runs, it can run."""
        check_target(target)
        return None

    def why_not_here(self) -> str | None:
        """What the model runs, it can run."""
        return None


SCALED_MM = ScaledMM()
AS_IS = AsIs()
