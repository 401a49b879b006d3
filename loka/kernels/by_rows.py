"""The operator `loka::mm_by_rows`: one GEMM whose kernel depends on how many rows the batch has.

    loka::mm_by_rows(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, str scaling_a, str scaling_b, ScalarType dtype,
                     bool fast, SymInt tick, int along, str table, Tensor? bias=None) -> Tensor

As the other GEMMs (`gemm_operator`), and a table that the plan has decided: "2048: fbgemm.rowwise, 8192: mslk.rowwise"
says that up to 2048 rows run on the catalogue's kernel fbgemm.rowwise, and all others on mslk.rowwise. The rows are
those of `a` along its dimension `along`: 0 in fprop and dgrad, 1 in wgrad, which contracts over the batch.

The choice is made inside of the operator, so that a compiled model neither sees it nor is compiled again for another
batch; a CUDA graph has the kernel that was chosen when it was captured. The call counts under the kernel that ran. One
string costs 0.9 us more than an operator without a table, lists of limits and names 2.4 us (torch 2.13, one CPU core);
the kernels' own operators are not called, which would be 3.3 us more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from loka.errors import InputError
from loka.kernels import gemm_operator
from loka.kernels.catalogue import operator_named
from loka.kernels.gemm_operator import GemmFunction

NAME = "loka::mm_by_rows"

_ENTRY = re.compile(r"(\d+): ([a-z0-9_.]+)")


def table_text(by_rows: Sequence[tuple[int, str]]) -> str:
    """A table, (most rows, kernel) ascending, as the operator takes it; the last kernel has no limit.

    Raises InputError where it is empty or does not ascend.
    """
    limits = [limit for limit, _ in by_rows]
    if not limits or limits != sorted(set(limits)) or limits[0] < 0:
        raise InputError(f"a table of kernels by rows has limits that ascend, not {limits}")
    return ", ".join(f"{limit}: {kernel}" for limit, kernel in by_rows)


def parse_table(text: str) -> tuple[tuple[int, str], ...]:
    """What `table_text` wrote. Raises InputError for anything else."""
    found = [_ENTRY.fullmatch(entry) for entry in text.split(", ")]
    rows = tuple((int(entry[1]), entry[2]) for entry in found if entry is not None)
    if len(rows) < len(found) or table_text(rows) != text:
        raise InputError(f"{NAME}: {text!r} is no table of kernels by rows, as in '2048: fbgemm.rowwise, 8192: ...'")
    return rows


@cache
def _functions(table: str, on_gpu: bool) -> tuple[tuple[tuple[int, GemmFunction], ...], GemmFunction]:
    """The table with what its kernels run on a GPU or a CPU, the last one apart."""
    device = "cuda" if on_gpu else "cpu"
    rows = [(limit, gemm_operator.function_of(operator_named(kernel), device)) for limit, kernel in parse_table(table)]
    return tuple(rows[:-1]), rows[-1][1]


def _run(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    scaling_a: str,
    scaling_b: str,
    dtype: torch.dtype,
    fast: bool,
    tick: int,
    along: int,
    table: str,
    bias: Tensor | None = None,
) -> Tensor:
    limited, chosen = _functions(table, a.is_cuda)
    rows = a.size(along)
    for limit, function in limited:
        if rows <= limit:
            chosen = function
            break
    return chosen(a, scale_a, b, scale_b, scaling_a, scaling_b, dtype, fast, tick, bias)


def _fake(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    scaling_a: str,
    scaling_b: str,
    dtype: torch.dtype,
    fast: bool,
    tick: int,
    along: int,
    table: str,
    bias: Tensor | None = None,
) -> Tensor:
    return gemm_operator.fake_product(NAME, a, b, dtype, bias)


gemm_operator.register(
    "mm_by_rows", f"{gemm_operator.ARGUMENTS}, int along, str table, {gemm_operator.BIAS}", _run, _run, _fake
)
_operator = torch.ops.loka.mm_by_rows.default


def mm_by_rows(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    scaling_a: str,
    scaling_b: str,
    dtype: torch.dtype,
    fast: bool,
    tick: int,
    along: int,
    table: str,
    bias: Tensor | None = None,
) -> Tensor:
    """Call the operator. a: FP8 (R, C); b: FP8 (S, C); scales: float32, two-dimensional; result: (R, S) of `dtype`.

    Raises InputError where the table is malformed, the chosen kernel refuses the operands, or its library is missing.
    """
    out: Tensor = _operator(a, scale_a, b, scale_b, scaling_a, scaling_b, dtype, fast, tick, along, table, bias)
    return out
