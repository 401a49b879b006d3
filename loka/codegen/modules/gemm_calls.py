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


def gemm_call(
    gemm: Gemm, recipe: GemmRecipe, operands: Sequence[str], dtype: str, counter_id: str, bias: str | None = None
) -> str:
    """`dispatch.scaled_mm(...)` or the planned kernel's own operator; `operands` are a, its scales, b, its scales."""
    scalings = [quoted(operand.scaling.value) for operand in recipe.operands]
    fast = repr(recipe.accumulation == Accumulation.FAST)
    arguments = [*operands, *scalings, dtype, fast, counter_id, *_table(recipe.m_buckets)]
    return call(_function(gemm, recipe), [*arguments, bias] if bias is not None else arguments)


def operator_name(gemm: Gemm, recipe: GemmRecipe) -> str:
    """Name of a function of `loka.dispatch`, or of another library's operator: fbgemm::f8f8bf16_rowwise."""
    if recipe.m_buckets:
        return "mm_by_k_bucket" if gemm is Gemm.WGRAD else "mm_by_m_bucket"
    return "scaled_mm" if recipe.kernel == SCALED_MM.name else _operator(recipe.kernel)


def _function(gemm: Gemm, recipe: GemmRecipe) -> str:
    """Expression of the operator; other libraries' are in `torch.ops`, registered by importing `loka.dispatch`."""
    name = operator_name(gemm, recipe)
    return f"torch.ops.{name.replace('::', '.')}.default" if "::" in name else f"dispatch.{name}"


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
