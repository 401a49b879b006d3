"""The graphs that Inductor would get for a bound model on a Hopper GPU, traced from CPU tensors and never run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import triton
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from triton.backends.compiler import GPUTarget

from loka.kernels import decomposition
from loka.kernels.gemm import scaled_mm

PARTITION: Callable[..., Any] = min_cut_rematerialization_partition  # Inductor's


class HopperDriver:
    """As much of Triton's driver as it needs to find out which arguments a kernel writes."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def pretend_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors count as those of a Hopper GPU where AOTAutograd traces."""
    monkeypatch.setattr(triton.runtime.driver, "_active", HopperDriver(), raising=False)
    monkeypatch.setattr(decomposition, "on_gpu", lambda x: True)
    monkeypatch.setattr(scaled_mm, "_takes_recipe", lambda first, second, *rest: first == second)


def traced(model: nn.Module, *inputs: Tensor, dynamic: bool = False, backward: bool = True) -> list[GraphModule]:
    """Graphs of a step, forward and backward, for each of the inputs in turn; results are zero."""
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, examples: Sequence[Any]) -> Any:
        graphs.append(graph)
        results = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        return make_boxed_func(lambda *arguments: [_like(result) for result in results])

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=PARTITION)
    step = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend)
    for x in inputs:
        y = step(x.requires_grad_())
        if backward:
            y.sum().backward()
    return graphs


def _like(result: Node | None) -> Any:
    value = None if result is None else result.meta["val"]
    if not isinstance(value, Tensor):
        return value if value is None else _number(value)
    return torch.zeros(tuple(map(_number, value.shape)), dtype=value.dtype)


def _number(size: Any) -> int:
    return 2 if has_free_unbacked_symbols(size) else int(size)


def calls(graphs: Sequence[GraphModule]) -> list[Node]:
    """The calls in graphs, in order."""
    return [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]


def operators(graphs: Sequence[GraphModule], namespace: str) -> list[str]:
    """Names of the operators of a namespace that graphs call, in order."""
    return [str(node.target) for node in calls(graphs) if str(node.target).startswith(f"{namespace}.")]


def launches(graphs: Sequence[GraphModule]) -> list[tuple[str, frozenset[str]]]:
    """Name of each Triton kernel that graphs launch, and the parameters that it writes."""
    nodes = [node for node in calls(graphs) if "triton_kernel_wrapper" in str(node.target)]
    kernels = [kernel_side_table.get_kernel(node.kwargs["kernel_idx"]) for node in nodes]
    names = [getattr(kernel, "fn", kernel).__name__ for kernel in kernels]
    return [(name, frozenset(node.kwargs["tensors_to_clone"])) for name, node in zip(names, nodes, strict=True)]
