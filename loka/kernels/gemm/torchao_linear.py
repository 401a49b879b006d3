"""torchao's Float8Linear, as a candidate for whole regions: measured, never generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loka.kernels.gemm.gemm_kernel import BFLOAT16, check_target
from loka.kernels.gemm.gpu_here import FP8_CAPABILITY
from loka.kernels.gemm.library import Library
from loka.numerics.enums import Accumulation, Gemm

if TYPE_CHECKING:
    from loka.policy.cascade.settings import OperandRecipe

LIBRARY = Library(
    name="torchao",
    distributions=("torchao", "torchao-nightly"),
    oldest=(0, 17),
    install="pip install 'loka[torchao]'",
    module="torchao.float8",
    operator="",
    capability=FP8_CAPABILITY,
)
WHOLE_REGION = (
    "torchao's Float8Linear is a module that quantises, transposes and multiplies by itself: its GEMMs cannot be taken "
    "one by one, and torch.compile writes its kernels; it is measured beside the regions of LoKA (loka bench region)"
)


@dataclass(frozen=True, slots=True)
class Float8Linear:
    """A linear with its quantisation, forward and backward, as torch.compile makes it of torchao's module."""

    name: str = "torchao.float8_linear"
    operator: None = None
    library: Library = LIBRARY

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
        """It runs no GEMM alone."""
        check_target(target)
        return WHOLE_REGION

    def unavailable_reason(self) -> str | None:
        """It needs torchao and a GPU with FP8."""
        return self.library.unavailable_reason()


FLOAT8_LINEAR = Float8Linear()
