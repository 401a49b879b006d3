"""The recipes for which errors are estimated, by GEMM, and their labels."""

from __future__ import annotations

from loka.numerics.enums import OPERANDS, Format, Gemm, Operand, Scaling
from loka.numerics.recipe import OperandPair, OperandRecipe, transposed_copy
from loka.numerics.scalings import BLOCKS, blockwise

_ROWS = OperandRecipe(power_of_two=True)  # source of a transposed operand
_BESIDE_ROWS = transposed_copy(Format.E4M3, Scaling.ROWWISE)
_BESIDE_TRANSPOSED = transposed_copy(Format.E4M3, None)
_TRANSPOSED = {
    Gemm.FPROP: (_ROWS, _ROWS),
    Gemm.DGRAD: (_ROWS, _BESIDE_ROWS),
    Gemm.WGRAD: (_BESIDE_TRANSPOSED, _BESIDE_TRANSPOSED),
}


def candidates(gemm: Gemm) -> tuple[OperandPair, ...]:
    """The standard recipes of a GEMM, all with dynamic scales, in a fixed order and without duplicates.

    e4m3 tensorwise, rowwise and in blocks (1x128, a weight 128x128); e5m2 for the output gradient only, tensorwise and
    rowwise, if there is one; e5m2 for both operands, tensorwise and rowwise; and the e4m3 recipe with transposed
    operands: fprop rowwise with power-of-two scales, dgrad the same with its weight transposed, wgrad with both
    transposed.
    """
    first, second = OPERANDS[gemm]
    pairs = [_pair(Format.E4M3, Format.E4M3, scaling) for scaling in (Scaling.TENSORWISE, Scaling.ROWWISE)]
    pairs.append((OperandRecipe(scaling=blockwise(first)), OperandRecipe(scaling=blockwise(second))))
    if first is Operand.GRAD_OUTPUT:
        pairs += [_pair(Format.E5M2, Format.E4M3, scaling) for scaling in (Scaling.TENSORWISE, Scaling.ROWWISE)]
    pairs += [_pair(Format.E5M2, Format.E5M2, scaling) for scaling in (Scaling.TENSORWISE, Scaling.ROWWISE)]
    pairs.append(_TRANSPOSED[gemm])
    return tuple(dict.fromkeys(pairs))


def recipe_label(gemm: Gemm, pair: OperandPair) -> str:
    """A recipe in words: "e4m3 rowwise", or both operands if they differ."""
    one, other = (_describe_operand(recipe) for recipe in pair)
    if one == other:
        return one
    return ", ".join(f"{operand.value} {text}" for operand, text in zip(OPERANDS[gemm], (one, other), strict=True))


def _pair(first: Format, second: Format, scaling: Scaling) -> OperandPair:
    return (OperandRecipe(format=first, scaling=scaling), OperandRecipe(format=second, scaling=scaling))


def _describe_operand(recipe: OperandRecipe) -> str:
    if recipe.transposed:
        return f"{recipe.format.value} transposed"
    text = f"{recipe.format.value} {BLOCKS[recipe.scaling].label}"
    if recipe.power_of_two:
        text += ", scales powers of two"
    if recipe.is_static:
        text += f", static amax {recipe.amax:g}" if recipe.amax is not None else ", static"
    return text
