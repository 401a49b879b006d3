"""The calls of FP8 GEMMs in generated code: which operator, and what it is given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from loka.codegen.text.layout import Code, call, literal, quoted
from loka.errors import LokaError
from loka.kernels.gemm.catalogue import SCALED_MM, kernel_named
from loka.kernels.gemm.m_buckets import table_text
from loka.numerics.enums import Accumulation, Gemm
from loka.numerics.recipe import OperandPair


@dataclass(frozen=True, slots=True)
class GemmRecipe:
    """What one GEMM runs in, and on which kernel; None as a recipe stands for "as the model has it"."""

    operands: OperandPair
    accumulation: Accumulation
    kernel: str = SCALED_MM.name
    m_buckets: tuple[tuple[int, str], ...] = ()  # as in a GemmPlan


@dataclass(frozen=True, slots=True)
class GemmView:
    """An FP8 GEMM but for its operands, as the macro `gemm` of templates/chain/calls.j2 reads it."""

    operator: str  # "dispatch.scaled_mm"
    scaling: tuple[str, str]  # of both operands
    one_scale: tuple[bool, bool]  # whether the first of an operand's scales stands for all
    fast: bool  # accumulation
    m_buckets: str  # the literal of the table of kernels by the batch's rows; "" without one


def gemm_view(gemm: Gemm, recipe: GemmRecipe) -> GemmView:
    """The operator that runs a GEMM, with what it is told beside its operands."""
    first, second = recipe.operands
    table = "".join(code.flat() for code in _table(recipe.m_buckets))
    return GemmView(
        _function(gemm, recipe),
        (first.scaling.value, second.scaling.value),
        (first.reads_first_scale, second.reads_first_scale),
        recipe.accumulation == Accumulation.FAST,
        table,
    )


def gemm_call(
    gemm: Gemm, recipe: GemmRecipe, operands: Sequence[str], dtype: str, counter_id: str, bias: str | None = None
) -> Code:
    """`dispatch.scaled_mm(...)` or the planned kernel's own operator; `operands` are a, its scales, b, its scales."""
    scalings = [quoted(operand.scaling.value) for operand in recipe.operands]
    fast = repr(recipe.accumulation == Accumulation.FAST)
    arguments = [Code(item) for item in (*operands, *scalings, dtype, fast, counter_id)]
    arguments += _table(recipe.m_buckets)
    arguments += [Code(bias)] if bias is not None else []
    return call(_function(gemm, recipe), arguments)


def _function(gemm: Gemm, recipe: GemmRecipe) -> str:
    """Operators of other libraries than torch are called as such: importing `loka.dispatch` registers them."""
    if recipe.m_buckets:
        return "dispatch.mm_by_k_bucket" if gemm is Gemm.WGRAD else "dispatch.mm_by_m_bucket"
    if recipe.kernel == SCALED_MM.name:
        return "dispatch.scaled_mm"
    return f"torch.ops.{_operator(recipe.kernel).replace('::', '.')}.default"


def _table(m_buckets: Sequence[tuple[int, str]]) -> list[Code]:
    """The table of kernels by the batch's rows, for a GEMM that has one."""
    for _, kernel in m_buckets:
        _operator(kernel)
    return [literal(table_text(m_buckets))] if m_buckets else []


def _operator(kernel: str) -> str:
    operator = kernel_named(kernel).operator
    if operator is None:
        raise LokaError(f"a plan runs {kernel!r}, which has no operator. This is a fault in LoKA: please report it.")
    return operator


def kernel_suffix(recipe: GemmRecipe) -> str:
    """What a kernel adds to a function's name: "_on_fbgemm_rowwise", "_m_buckets"; torch's adds nothing."""
    if recipe.m_buckets:
        return "_m_buckets"
    return "" if recipe.kernel == SCALED_MM.name else "_on_" + re.sub(r"\W", "_", recipe.kernel)


def kernel_label(recipe: GemmRecipe) -> str:
    """The same as prose: " on fbgemm.rowwise", " on fbgemm.rowwise up to 2048 rows, then torch.scaled_mm"."""
    if not recipe.m_buckets:
        return "" if recipe.kernel == SCALED_MM.name else f" on {recipe.kernel}"
    steps = [f"{kernel} up to {limit} rows" for limit, kernel in recipe.m_buckets[:-1]]
    return " on " + ", then ".join([*steps, recipe.m_buckets[-1][1]])
