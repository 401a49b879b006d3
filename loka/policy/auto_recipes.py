"""The recipes that `scaling: auto` leaves open: each is priced at planning, and the fastest within the budget is taken.

All have dynamic scales. A static range is a promise about data that nothing but training can keep, and no chain of
fused kernels quantizes in blocks: neither is taken unless a policy asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loka.numerics.enums import OPERANDS, Format, Gemm, Operand, Scaling
from loka.numerics.recipe import TRANSPOSED_FROM, OperandPair, OperandRecipe, transposed_copy


@dataclass(frozen=True, slots=True)
class AutoRecipe:
    """One recipe of a site. With `transposes`, dgrad and wgrad read transposed copies where they can."""

    label: str
    scaling: Scaling
    power_of_two: bool = False
    transposes: bool = False

    def operands(self, gemm: Gemm, formats: Mapping[tuple[Gemm, Operand], Format]) -> OperandPair:
        """The operands of a GEMM, in the formats that the policy gives them; a copy has that of its source."""
        first, second = (self._operand(gemm, operand, formats) for operand in OPERANDS[gemm])
        return first, second

    def _operand(self, gemm: Gemm, operand: Operand, formats: Mapping[tuple[Gemm, Operand], Format]) -> OperandRecipe:
        if not self._transposed(gemm, operand):
            return OperandRecipe(formats[gemm, operand], self.scaling, power_of_two=self.power_of_two)
        (other,) = (each for each in OPERANDS[gemm] if each is not operand)
        beside = None if self._transposed(gemm, other) else self.scaling
        return transposed_copy(formats[TRANSPOSED_FROM[gemm, operand]], beside)

    def _transposed(self, gemm: Gemm, operand: Operand) -> bool:
        return self.transposes and (gemm, operand) in TRANSPOSED_FROM


AUTO_RECIPES = (  # the first of those that are equally fast is taken
    AutoRecipe("rowwise, powers of two, transposed copies", Scaling.ROWWISE, power_of_two=True, transposes=True),
    AutoRecipe("rowwise", Scaling.ROWWISE),
    AutoRecipe("tensorwise", Scaling.TENSORWISE),
)
