"""Calls of FP8 GEMMs in generated code: the operator and its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from loka.codegen.layout import call, literal, quoted
from loka.errors import LokaError
from loka.kernels.gemm.catalogue import SCALED_MM, kernel_named
from loka.kernels.gemm.m_buckets import table_text
from loka.numerics.enums import Accumulation, Gemm
from loka.numerics.recipe import OperandPair


@dataclass(frozen=True, slots=True)
class GemmRecipe:
    """Recipe and kernel of one FP8 GEMM. Where it is optional, None means native."""

    operands: OperandPair
    accumulation: Accumulation
    kernel: str = SCALED_MM.name
    m_buckets: tuple[tuple[int, str], ...] = ()  # as in a GemmPlan


@dataclass(frozen=True, slots=True)
class GemmView:
    """An FP8 GEMM without its operands, for the macro `gemm` of templates/chain/calls.j2."""

    operator: str  # "dispatch.scaled_mm"
    scaling: tuple[str, str]  # of both operands
    one_scale: tuple[bool, bool]  # for each operand: its first scale applies to all
    fast: bool  # accumulation
    m_buckets: str  # literal of the table of kernels by rows of the batch; "" without one

    @property
    def scalings(self) -> str:
        """Arguments that name both scalings: equal ones are a constant of the module."""
        first, second = self.scaling
        return f"*{first.upper()}" if first == second else f'"{first}", "{second}"'


def gemm_view(gemm: Gemm, recipe: GemmRecipe) -> GemmView:
    """The view of a GEMM: its operator and the arguments other than operands."""
    first, second = recipe.operands
    table = "".join(_table(recipe.m_buckets))
    return GemmView(
        _function(gemm, recipe),
        (first.scaling.value, second.scaling.value),
        (first.reads_first_scale, second.reads_first_scale),
        recipe.accumulation == Accumulation.FAST,
        table,
    )


def gemm_call(
    gemm: Gemm, recipe: GemmRecipe, operands: Sequence[str], dtype: str, counter_id: str, bias: str | None = None
) -> str:
    """`dispatch.scaled_mm(...)` or the planned kernel's own operator; `operands` are a, its scales, b, its scales."""
    scalings = [quoted(operand.scaling.value) for operand in recipe.operands]
    fast = repr(recipe.accumulation == Accumulation.FAST)
    arguments = [*operands, *scalings, dtype, fast, counter_id, *_table(recipe.m_buckets)]
    return call(_function(gemm, recipe), [*arguments, bias] if bias is not None else arguments)


def _function(gemm: Gemm, recipe: GemmRecipe) -> str:
    """Expression of the operator; other libraries' are in `torch.ops`, registered by importing `loka.dispatch`."""
    if recipe.m_buckets:
        return "dispatch.mm_by_k_bucket" if gemm is Gemm.WGRAD else "dispatch.mm_by_m_bucket"
    if recipe.kernel == SCALED_MM.name:
        return "dispatch.scaled_mm"
    return f"torch.ops.{_operator(recipe.kernel).replace('::', '.')}.default"


def _table(m_buckets: Sequence[tuple[int, str]]) -> list[str]:
    """The argument with the table of kernels by rows of the batch, or no argument."""
    for _, kernel in m_buckets:
        _operator(kernel)
    return [literal(table_text(m_buckets))] if m_buckets else []


def _operator(kernel: str) -> str:
    operator = kernel_named(kernel).operator
    if operator is None:
        raise LokaError(f"a plan runs {kernel!r}, which has no operator. This is a fault in LoKA: please report it.")
    return operator


def kernel_suffix(recipe: GemmRecipe) -> str:
    """Suffix of a function's name for its kernel: "_on_fbgemm_rowwise", "_m_buckets", or "" for torch's."""
    if recipe.m_buckets:
        return "_m_buckets"
    return "" if recipe.kernel == SCALED_MM.name else "_on_" + re.sub(r"\W", "_", recipe.kernel)


def kernel_label(recipe: GemmRecipe) -> str:
    """The suffix in words: " on fbgemm.rowwise", " on fbgemm.rowwise up to 2048 rows, then torch.scaled_mm"."""
    if not recipe.m_buckets:
        return "" if recipe.kernel == SCALED_MM.name else f" on {recipe.kernel}"
    steps = [f"{kernel} up to {limit} rows" for limit, kernel in recipe.m_buckets[:-1]]
    return " on " + ", then ".join([*steps, recipe.m_buckets[-1][1]])
