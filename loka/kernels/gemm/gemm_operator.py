"""The common signature of FP8 GEMM operators, and their registration.

    loka::NAME(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, str scaling_a, str scaling_b,
               ScalarType dtype, bool fast, SymInt counter_id, Tensor? bias=None) -> Tensor

`(a * scale_a) @ (b * scale_b).T + bias` for FP8 a of (R, C) and b of (S, C), with scales in the shapes of
`numerics.quantize.scale_shape`, and a bias of (S,) or none; the result is (R, S), contiguous, of `dtype`. Sizes may be
zero. `scaling_a` and `scaling_b` are values of `names.Scaling`; `fast` is the tensor core's fast accumulation, which
the reference ignores; `counter_id` is the counter of the call, which counts under the name of the kernel
(`call_counters`).

Every operator in the namespace `loka` is such a GEMM. An operator has no derivative: it is called inside a
torch.autograd.Function. It is defined with torch.library.Library: an empty operator of this signature then costs 4 us
per call, compared with 13 us with torch.library.custom_op (torch 2.13, one CPU core).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from loka.errors import InputError
from loka.kernels import call_counters, decomposition
from loka.kernels.fused.operators import known_to_inductor
from loka.numerics.enums import GEMM_NAMESPACE
from loka.numerics.quantize import reference_scaled_mm

ARGUMENTS = (
    "Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, str scaling_a, str scaling_b, "
    "ScalarType dtype, bool fast, SymInt counter_id"
)
BIAS = "Tensor? bias=None"


class GemmFunction(Protocol):
    """Implementation of an operator on a device."""

    def __call__(
        self,
        a: Tensor,
        scale_a: Tensor,
        b: Tensor,
        scale_b: Tensor,
        scaling_a: str,
        scaling_b: str,
        dtype: torch.dtype,
        fast: bool,
        counter_id: int,
        bias: Tensor | None = None,
        /,
    ) -> Tensor:
        """The product, (R, S)."""
        ...


_library = torch.library.Library(GEMM_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_functions: dict[torch._ops.OpOverload, dict[str, GemmFunction]] = {}  # of each operator, by device type
_references: dict[str, Callable[..., Tensor]] = {}  # what runs on the CPU, by name; with the arguments of the operator


def define(name: str, cpu: GemmFunction, cuda: GemmFunction) -> torch._ops.OpOverload:
    """Register the operator `loka::NAME` and return it; `cpu` and `cuda` must count their calls.

    A name can be used once per process: torch raises RuntimeError the second time.
    """
    overload = register(name, f"{ARGUMENTS}, {BIAS}", cpu, cuda)
    _functions[overload] = {"cpu": cpu, "cuda": cuda}
    return overload


def function_of(operator: torch._ops.OpOverload, device: str) -> GemmFunction:
    """Implementation of an operator from `define` on a device type, for an operator that dispatches to several."""
    return _functions[operator][device]


def reference_of(operator: torch._ops.OpOverload) -> Callable[..., Tensor]:
    """What runs on the CPU for an operator of the namespace `loka`, with its arguments."""
    return _references[operator._schema.name.partition("::")[2]]


def flop_formulas() -> Iterator[tuple[torch._ops.OpOverloadPacket, Callable[..., int]]]:
    """Every operator of the namespace, with its FLOPs by the shapes of its arguments."""
    for name in _references:
        yield getattr(torch.ops.loka, name), lambda a, scale_a, b, *_, **__: 2 * a[0] * a[1] * b[0]


def decompose(name: str, function: Callable[..., Tensor], visible: Callable[..., bool]) -> None:
    """On GPUs, AOTAutograd traces `function` instead of the operator `loka::NAME` where `visible(*arguments)`."""
    decomposition.register(f"{GEMM_NAMESPACE}::{name}", function, _library, visible)


def register(name: str, arguments: str, cpu: Callable[..., Tensor], cuda: object) -> torch._ops.OpOverload:
    """Define `loka::NAME(arguments) -> Tensor` with its implementations; the arguments end with the bias."""
    qualified = f"{GEMM_NAMESPACE}::{name}"

    def fake(a: Tensor, scale_a: Tensor, b: Tensor, *others: Any) -> Tensor:
        bias = others[-1] if isinstance(others[-1], Tensor) else None  # torch leaves it out where it is None
        return _fake_product(qualified, a, b, others[3], bias)

    _library.define(f"{name}({arguments}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    torch.library.register_fake(qualified, known_to_inductor(qualified, fake), lib=_library)
    _references[name] = cpu
    _library.impl(name, cpu, "CPU")  # type: ignore[no-untyped-call]
    _library.impl(name, cuda, "CUDA")  # type: ignore[no-untyped-call]
    overload: torch._ops.OpOverload = getattr(torch.ops.loka, name).default
    return overload


def _fake_product(name: str, a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """Shape and dtype of the result, without running or counting."""
    if a.dim() != 2 or b.dim() != 2:
        raise InputError(f"{name}: a is {tuple(a.shape)} and b is {tuple(b.shape)}; both must be matrices")
    torch._check(  # type: ignore[no-untyped-call]
        a.shape[1] == b.shape[1], lambda: f"{name}: a has {a.shape[1]} columns and b has {b.shape[1]}"
    )
    if bias is not None:
        torch._check(  # type: ignore[no-untyped-call]
            bias.dim() == 1 and bias.shape[0] == b.shape[0],
            lambda: f"{name}: the bias is {tuple(bias.shape)} and b has {b.shape[0]} rows",
        )
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def reference(name: str, kernel: str, written: torch.dtype | None = None) -> GemmFunction:
    """The reference of the operator `name`: dequantize, multiply in float32. It takes every pair of recipes.

    Its calls count as `kernel`. `written` is the only dtype that the kernel writes, to which the result is rounded
    first; None where it writes every dtype.
    """

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
        bias: Tensor | None = None,
    ) -> Tensor:
        call_counters.increment(counter_id, kernel)
        if bias is None:
            return reference_scaled_mm(a, scale_a, b, scale_b, written or dtype).to(dtype)
        check_bias(name, bias, b)
        product = reference_scaled_mm(a, scale_a, b, scale_b, torch.float32)
        return (product + bias.float()).to(written or dtype).to(dtype)

    return run


def check_bias(name: str, bias: Tensor, b: Tensor) -> None:
    """Raise InputError unless the bias has an element for each row of b."""
    if bias.dim() != 1 or bias.shape[0] != b.shape[0]:
        raise InputError(f"{name}: the bias is {tuple(bias.shape)} and b has {b.shape[0]} rows")


def empty_product(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """The product if one of its sizes is zero."""
    empty = a.new_zeros((a.shape[0], b.shape[0]), dtype=dtype)
    return empty if bias is None else empty + bias.to(dtype)
