"""The operators `loka::mm_by_m_bucket` and `loka::mm_by_k_bucket`: a GEMM whose kernel depends on the batch's rows.

    loka::mm_by_m_bucket(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, str scaling_a, str scaling_b,
                         ScalarType dtype, bool fast, SymInt counter_id, str table, Tensor? bias=None) -> Tensor

The arguments are those of other GEMMs (`gemm_operator`) and a table from the plan: with "2048: fbgemm.rowwise, 8192:
mslk.rowwise", up to 2048 rows run on the catalogue's kernel fbgemm.rowwise, and all others on mslk.rowwise. The batch's
rows are the rows of `a` in fprop and dgrad (`mm_by_m_bucket`), and its columns in wgrad, which contracts over them
(`mm_by_k_bucket`). Where a chain's copies for wgrad are padded to a multiple of 16 columns, these are what is compared:
limits that are multiples of 16, as all of plans are, send such a batch to the same kernel.

The kernel is chosen inside the operator, so that a compiled model does not see the choice and is not recompiled for
another batch; a CUDA graph keeps the kernel that was chosen during capture. The call counts under the kernel that ran.
In eager mode on a GPU the choice needs no operator, and torch's GEMM is called as `scaled_mm` calls it. The compiler
sees it where the number of rows is known to the compiler.
It costs 0.7 to 0.8 us more than an operator without a table (torch 2.13, one CPU core); calling the kernels' own
operators would cost 3.3 us more.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from loka.errors import InputError
from loka.kernels.fused.operators import runs_directly
from loka.kernels.gemm import gemm_operator, scaled_mm
from loka.kernels.gemm.catalogue import operator_named
from loka.kernels.gemm.gemm_operator import GemmFunction
from loka.kernels.gemm.scaled_mm import KERNEL

_ENTRY = re.compile(r"(\d+): ([a-z0-9_.]+)")


def table_text(m_buckets: Sequence[tuple[int, str]]) -> str:
    """The operator's text for a table of (most rows, kernel), ascending; the last kernel has no limit.

    Raises InputError for a table that is empty or not ascending.
    """
    limits = [limit for limit, _ in m_buckets]
    if not limits or limits != sorted(set(limits)) or limits[0] < 0:
        raise InputError(f"a table of kernels by rows has limits that ascend, not {limits}")
    return ", ".join(f"{limit}: {kernel}" for limit, kernel in m_buckets)


def parse_table(text: str) -> tuple[tuple[int, str], ...]:
    """Parses the text of `table_text`. Raises InputError for anything else."""
    found = [_ENTRY.fullmatch(entry) for entry in text.split(", ")]
    rows = tuple((int(entry[1]), entry[2]) for entry in found if entry is not None)
    if len(rows) < len(found) or table_text(rows) != text:
        raise InputError(f"{text!r} is no table of kernels by rows, as in '2048: fbgemm.rowwise, 8192: ...'")
    return rows


def _functions(device: str, table: str) -> tuple[tuple[int, ...], tuple[GemmFunction, ...]]:
    """The limits of all kernels but the last, and the implementation of each kernel on a device type."""
    limits, names = _names(table)
    return limits, tuple(gemm_operator.function_of(operator_named(name), device) for name in names)


def _register(name: str, dimension: int) -> torch._ops.OpOverload:
    """Define an operator whose batch is a dimension of `a`."""

    def run_on(device: str) -> Callable[..., Tensor]:
        functions_of = cache(partial(_functions, device))

        def run(
            a: Tensor,
            scale_a: Tensor,
            b: Tensor,
            scale_b: Tensor,
            scaling_a: str,
            scaling_b: str,
            dtype: torch.dtype,
            fast: bool,
            counter_id: int,
            table: str,
            bias: Tensor | None = None,
        ) -> Tensor:
            limits, functions = functions_of(table)
            chosen = functions[bisect_left(limits, a.size(dimension))]
            return chosen(a, scale_a, b, scale_b, scaling_a, scaling_b, dtype, fast, counter_id, bias)

        return run

    arguments = f"{gemm_operator.ARGUMENTS}, str table, {gemm_operator.BIAS}"
    return gemm_operator.register(name, arguments, run_on("cpu"), run_on("cuda"))


@cache
def _names(table: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The limits of all kernels but the last, and the name of each kernel."""
    rows = parse_table(table)
    return tuple(limit for limit, _ in rows[:-1]), tuple(kernel for _, kernel in rows)


def _is_torchs(size: int, table: str) -> bool:
    """True if the table sends a batch of `size` rows to torch's GEMM."""
    limits, names = _names(table)
    return names[bisect_left(limits, size)] == KERNEL


def _decompose(name: str, dimension: int) -> None:
    """Let the compiler see torch's GEMM where the batch's rows are known and the table sends them there."""

    def function(*arguments: Any) -> Tensor:
        return scaled_mm.traced(*arguments[:9], *arguments[10:])  # without the table

    def visible(*arguments: Any) -> bool:
        size = arguments[0].shape[dimension]
        without_table = (*arguments[:9], *arguments[10:])
        return type(size) is int and _is_torchs(size, arguments[9]) and scaled_mm.taken_as_is(*without_table)

    gemm_operator.decompose(name, function, visible)


_m_bucket = _register("mm_by_m_bucket", dimension=0)
_k_bucket = _register("mm_by_k_bucket", dimension=1)
_decompose("mm_by_m_bucket", dimension=0)
_decompose("mm_by_k_bucket", dimension=1)


def mm_by_m_bucket(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    scaling_a: str,
    scaling_b: str,
    dtype: torch.dtype,
    fast: bool,
    counter_id: int,
    table: str,
    bias: Tensor | None = None,
) -> Tensor:
    """The product of fprop or dgrad. a: FP8 (R, C), R of the batch; b: FP8 (S, C); result: (R, S) of `dtype`.

    Scales are float32, two-dimensional. Raises InputError where the table is malformed, the chosen kernel rejects the
    operands, or its library is missing.
    """
    if a.is_cuda and runs_directly() and _is_torchs(a.shape[0], table):
        return scaled_mm.scaled_mm(a, scale_a, b, scale_b, scaling_a, scaling_b, dtype, fast, counter_id, bias)
    out: Tensor = _m_bucket(a, scale_a, b, scale_b, scaling_a, scaling_b, dtype, fast, counter_id, table, bias)
    return out


def mm_by_k_bucket(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    scaling_a: str,
    scaling_b: str,
    dtype: torch.dtype,
    fast: bool,
    counter_id: int,
    table: str,
    bias: Tensor | None = None,
) -> Tensor:
    """The product of wgrad, as `mm_by_m_bucket`, where the batch is C: a is (R, C), b (S, C), the result (R, S)."""
    if a.is_cuda and runs_directly() and _is_torchs(a.shape[1], table):
        return scaled_mm.scaled_mm(a, scale_a, b, scale_b, scaling_a, scaling_b, dtype, fast, counter_id, bias)
    out: Tensor = _k_bucket(a, scale_a, b, scale_b, scaling_a, scaling_b, dtype, fast, counter_id, table, bias)
    return out
