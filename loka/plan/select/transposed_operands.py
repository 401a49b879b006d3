"""Checks that a GEMM's transposed operands have their source, in the right form."""

from __future__ import annotations

from collections.abc import Mapping

from loka.numerics.enums import OPERANDS, Gemm, Scaling
from loka.numerics.recipe import TRANSPOSED_FROM, OperandPair
from loka.plan.plan import GemmPlan
from loka.plan.report.format import format_recipe


def unsupported_transpose(gemm: Gemm, operands: OperandPair, decided: Mapping[Gemm, GemmPlan]) -> str | None:
    """Reason why an operand of a GEMM cannot be transposed from another GEMM's; None where all can.

    `decided` has the site's GEMMs before this one. A site whose input needs no gradient has no dgrad: its wgrad
    quantises the output gradient along its rows itself, and transposes it.
    """
    # From the last: wgrad's input, whose source is not affected by other refusals, gives the cause.
    for operand, recipe in reversed(tuple(zip(OPERANDS[gemm], operands, strict=True))):
        if not recipe.transposed:
            continue
        if (gemm, operand) not in TRANSPOSED_FROM:
            return f"{operand} is read along its rows in {gemm}; there is nothing to transpose it from"
        source_gemm, source = TRANSPOSED_FROM[gemm, operand]
        plan = decided.get(source_gemm)
        if plan is None:
            continue
        start = f"{operand} is to be transposed from {source_gemm}'s, which"
        if plan.operands is None:
            return f"{start} stays as it is"
        found = plan.operands[OPERANDS[source_gemm].index(source)]
        if not found.can_be_transposed:
            instead = ", or say nothing of requantize_transpose: under one scale, a copy made anew has the same values"
            return (
                f"{start} is {format_recipe(found)}; give {source_gemm} scaling: rowwise, range: dynamic and "
                f"power_of_two: true{instead if found.scaling is Scaling.TENSORWISE else ''}"
            )
    return None
