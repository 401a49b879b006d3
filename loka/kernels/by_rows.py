"""The operator `loka::mm_by_rows`: one GEMM whose kernel depends on how many rows the batch has.

    loka::mm_by_rows(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, str scaling_a, str scaling_b, ScalarType dtype,
                     bool fast, SymInt tick, int along, int[] limits, str[] kernels, Tensor? bias=None) -> Tensor

As the other GEMMs (`gemm_operator`), and a table that the plan has decided: where `a` has at most limits[i] elements
along its dimension `along`, and more than limits[i - 1], it runs on the catalogue's kernel kernels[i]; above all limits
on the last. `along` is the dimension of the batch's rows: 0 in fprop and dgrad, 1 in wgrad, which contracts over them.

The choice is made inside of the operator, so that a compiled model neither sees it nor is compiled again for another
batch; a CUDA graph has the kernel that was chosen when it was captured. The call counts under the kernel that ran.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loka.kernels import gemm_operator
from loka.kernels.catalogue import operator_named

NAME = "loka::mm_by_rows"


def kernel_for(rows: int, limits: Sequence[int], kernels: Sequence[str]) -> str:
    """The table's kernel for a batch of so many rows; `limits` ascend, and there are as many kernels."""
    for limit, kernel in zip(limits, kernels, strict=True):
        if rows <= limit:
            return kernel
    return kernels[-1]


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
    limits: Sequence[int],
    kernels: Sequence[str],
    bias: Tensor | None = None,
) -> Tensor:
    operator = operator_named(kernel_for(a.shape[along], limits, kernels))
    out: Tensor = operator(a, scale_a, b, scale_b, scaling_a, scaling_b, dtype, fast, tick, bias)
    return out


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
    limits: Sequence[int],
    kernels: Sequence[str],
    bias: Tensor | None = None,
) -> Tensor:
    return gemm_operator.fake_product(NAME, a, b, dtype, bias)


gemm_operator.register(
    "mm_by_rows",
    f"{gemm_operator.ARGUMENTS}, int along, int[] limits, str[] kernels, {gemm_operator.BIAS}",
    _run,
    _run,
    _fake,
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
    limits: Sequence[int],
    kernels: Sequence[str],
    bias: Tensor | None = None,
) -> Tensor:
    """Call the operator. a: FP8 (R, C); b: FP8 (S, C); scales: float32, two-dimensional; result: (R, S) of `dtype`.

    Raises InputError where the chosen kernel refuses the operands, or its library is missing.
    """
    out: Tensor = _operator(
        a, scale_a, b, scale_b, scaling_a, scaling_b, dtype, fast, tick, along, limits, kernels, bias
    )
    return out
