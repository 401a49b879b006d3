"""What AOTAutograd traces for our operators on a GPU: the calls that they make instead of the operators themselves.

So torch.compile sees Triton launches and `aten._scaled_mm`: it launches them from its own wrapper and plans their
memory. The rule is that of torch.library.triton_op, except that it holds on GPUs only, since the reference that runs on
the CPU has to stay one, for its bits. It holds where AOTAutograd traces and not where Dynamo does, as Dynamo does not
know the strides of gradients and makes copies of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode

_WRITES = "loka_writes"  # attribute of a kernel: what it writes, by dtypes and numbers


def register(
    qualified: str,
    function: Callable[..., Any],
    library: torch.library.Library,
    visible: Callable[..., bool] = lambda *arguments: True,
) -> None:
    """AOTAutograd traces `function` instead of the operator "NAMESPACE::NAME" where `visible(*arguments)`.

    Both take the operator's arguments, the first of which is a tensor or a list of tensors. The operator stays opaque
    on the CPU, in torch.export, where a size comes from data and may be zero, and where torch fills uninitialised
    memory, as Triton 3.6 cannot compile Inductor's code that fills FP8 tensors.
    """

    def rule(mode: Any, op: Any, types: Any, arguments: tuple[Any, ...], keywords: Any) -> Any:
        first = arguments[0][0] if isinstance(arguments[0], list) else arguments[0]
        opaque = keywords or not on_gpu(first) or _stays_opaque() or _sized_by_data(arguments)
        if opaque or not visible(*arguments):
            return mode.__torch_dispatch__(op, types, arguments, keywords)
        with mode:
            return function(*arguments)

    torch.library.register_torch_dispatch(qualified, FunctionalTensorMode, rule, lib=library)


def on_gpu(x: Tensor) -> bool:
    """True where Triton kernels run."""
    return x.is_cuda


def is_traced(x: object) -> bool:
    """True for a tensor that stands for another, as in the tracing of a graph."""
    return isinstance(x, Tensor) and type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int) -> None:
    """Trace the launch of a Triton kernel as a node of AOTAutograd's graph."""
    _remember_what_kernels_write()
    kernel.__dict__.setdefault(_WRITES, {})
    wrapped: Any = torch.library.wrap_triton(kernel)
    wrapped[grid](*arguments, num_warps=num_warps)


@cache
def _remember_what_kernels_write() -> None:
    """Let torch find out once, and not for each launch, which tensors one of our kernels writes.

    torch compiles the kernel to Triton's IR for that, 50 to 60 ms each time, when AOTAutograd traces a launch and again
    when Inductor lowers it: a tower of six blocks took 17 s to compile, and takes 9 s with this (H200, torch 2.11).
    """
    module = sys.modules["torch._higher_order_ops.triton_kernel_wrap"]
    name = "identify_mutated_tensors" if hasattr(module, "identify_mutated_tensors") else "identify_accessed_tensors"
    setattr(module, name, _remembered(getattr(module, name)))  # the second name is that of torch 2.13


def _remembered(find: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(find)
    def found(kernel: Any, arguments: dict[str, Any], *rest: Any) -> Any:
        launched = kernel.fn if hasattr(kernel, "configs") else kernel  # an Autotuner has the kernel as `fn`
        known = launched.__dict__.get(_WRITES)
        if known is None:
            return find(kernel, arguments, *rest)
        key = tuple((name, _type_or_number(value)) for name, value in arguments.items())
        if key not in known:
            known[key] = find(kernel, arguments, *rest)
        return known[key]

    return found


def _type_or_number(argument: object) -> object:
    plain = argument is None or isinstance(argument, int | float | str)
    return argument if plain else getattr(argument, "dtype", type(argument))


def _sized_by_data(arguments: Iterable[object]) -> bool:
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols  # takes half a second, for sympy

    tensors = (x for each in arguments for x in (each if isinstance(each, list) else [each]))
    return any(has_free_unbacked_symbols(x) for x in tensors if isinstance(x, Tensor))


def _stays_opaque() -> bool:
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if fills and torch.are_deterministic_algorithms_enabled():
        return True
    return not torch._functorch.config.decompose_custom_triton_ops  # torch.export sets it to False
