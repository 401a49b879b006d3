"""What AOTAutograd traces for our operators on a GPU: the calls that they make instead of the operators themselves.

So torch.compile sees Triton launches and `aten._scaled_mm`: it launches them from its own wrapper and plans their
memory. The rule is that of torch.library.triton_op, except that it holds on GPUs only, since the reference that runs on
the CPU has to stay whole, for its bits. It holds where AOTAutograd traces and not where Dynamo does, as Dynamo does not
know the strides of gradients and makes copies of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode


def register(
    qualified: str,
    function: Callable[..., Any],
    library: torch.library.Library,
    visible: Callable[..., bool] = lambda *arguments: True,
) -> None:
    """AOTAutograd traces `function` instead of the operator "NAMESPACE::NAME" where `visible(*arguments)`.

    Both take the operator's arguments, the first of which is a tensor. The operator stays whole on the CPU, in
    torch.export, and where torch fills uninitialised memory, as Triton 3.6 cannot compile Inductor's code that fills
    FP8 tensors.
    """

    def rule(mode: Any, op: Any, types: Any, arguments: tuple[Any, ...], keywords: Any) -> Any:
        if keywords or not on_gpu(arguments[0]) or _stays_whole() or not visible(*arguments):
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


def _stays_whole() -> bool:
    fills = torch.utils.deterministic.fill_uninitialized_memory and torch.are_deterministic_algorithms_enabled()
    return fills or not torch._functorch.config.decompose_custom_triton_ops  # torch.export sets it to False
