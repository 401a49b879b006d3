"""Catalogue of the kernels that a GEMM can run on (docs/kernels.md).

| kernel            | file         | what it is                                          |
|-------------------|--------------|-----------------------------------------------------|
| `torch.scaled_mm` | `torch_gemm` | the operator `loka::scaled_mm`: cuBLASLt on Hopper  |
| `fbgemm.rowwise`  | `fbgemm`     | FBGEMM GenAI's CUTLASS GEMM with rowwise scales     |
| `mslk.rowwise`    | `mslk`       | the same of MSLK, its successor                     |
| `as-is`           | `torch_gemm` | the model's own GEMM, in BF16 or TF32               |
"""

from __future__ import annotations

import difflib
from functools import cache

import torch

from loka.errors import InputError
from loka.kernels.gemm import fbgemm, mslk
from loka.kernels.gemm.gemm_kernel import GemmRequest, GemmSizes, Kernel, gemm_sizes
from loka.kernels.gemm.torch_gemm import NATIVE, SCALED_MM, Native, ScaledMM

__all__ = [
    "GEMM_KERNELS",
    "NATIVE",
    "PREFERRED",
    "SCALED_MM",
    "GemmRequest",
    "GemmSizes",
    "Kernel",
    "Native",
    "ScaledMM",
    "gemm_sizes",
    "kernel_named",
    "operator_named",
]

GEMM_KERNELS: tuple[Kernel, ...] = (  # FP8 kernels first
    SCALED_MM,
    fbgemm.ROWWISE,
    mslk.ROWWISE,
    NATIVE,
)
PREFERRED: tuple[Kernel, ...] = (SCALED_MM,)  # default FP8 kernels, where neither a policy nor a measurement decides


def kernel_named(name: str) -> Kernel:
    """The kernel of that name. Raises InputError, with the closest name, where there is none."""
    names = [kernel.name for kernel in GEMM_KERNELS]
    if name in names:
        return GEMM_KERNELS[names.index(name)]
    names.remove(NATIVE.name)  # not in a policy: `compute: keep`
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}?" if close else f"it can be {', '.join(names)}"
    raise InputError(f"there is no kernel {name!r}; {hint}")


@cache
def operator_named(name: str) -> torch._ops.OpOverload:
    """The operator of the named kernel, with the signature of `gemm_operator`. Raises InputError where it has none."""
    operator = kernel_named(name).operator
    if operator is None:
        raise InputError(f"the kernel {name!r} is not called by generated code: it has no operator")
    namespace, _, function = operator.partition("::")
    found: torch._ops.OpOverload = getattr(getattr(torch.ops, namespace), function).default
    return found
