"""An operand as a GEMM reads it in FP8, dequantized: the reference of what a recipe does to its values."""

from __future__ import annotations

from torch import Tensor

from loka.errors import InputError
from loka.numerics.enums import Scaling
from loka.numerics.quantize import dequantize, quantize
from loka.numerics.recipe import OperandRecipe
from loka.numerics.requantize_transpose import requantize_transpose


def fake_quantize(x: Tensor, recipe: OperandRecipe) -> Tensor:
    """The operand x of (R, C), contracted over C, quantized by `recipe` and dequantized: float32 (R, C).

    A transposed operand is made as in training, from the FP8 copy of its transpose. Raises InputError where x is not a
    matrix, or the recipe's static range has no `amax`.
    """
    if recipe.lacks_amax:
        raise InputError("fake_quantize: a recipe with range static needs an amax")
    if recipe.transposed:
        source = quantize(x.t(), format=recipe.format, scaling=Scaling.ROWWISE, power_of_two=True)
        return dequantize(requantize_transpose(source))
    return dequantize(
        quantize(x, format=recipe.format, scaling=recipe.scaling, power_of_two=recipe.power_of_two, amax=recipe.amax)
    )
