"""Lengths of traced loops: the number of items, where it is the same in every known call of the module."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from loka.graph.trace.examples import ExampleCall, copy_tree


class LoopError(Exception):
    """Tracing reached a loop over a traced value, whose length the trace does not have."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        """`node` of `graph` is iterated over; it is the latest traced node, or an earlier one."""
        super().__init__(node.name)
        self.graph, self.node = graph, node

    @property
    def place(self) -> int:
        """Identifies the loop: the number of operations before it, the same in every trace of the module."""
        return len(self.graph.nodes)


def length_of(module: nn.Module, loop: LoopError, calls: Sequence[ExampleCall]) -> int | None:
    """Number of items of the loop in all calls; None where it differs, or where the value is no list, tuple or Tensor.

    Runs the operations traced before the loop on `module`, which may change its buffers. Their exceptions are passed
    on.
    """
    before = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in loop.graph.nodes:
        copies[node] = before.node_copy(node, copies.__getitem__)
    before.output(copies[loop.node])
    run = fx.Interpreter(module, graph=before).run
    names = [str(node.target) for node in before.nodes if node.op == "placeholder"]
    lengths: set[int | None] = set()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for call in calls:
            given = inspect.signature(module.forward).bind(*copy_tree(call.args), **copy_tree(call.kwargs))
            given.apply_defaults()
            found = run(*(given.arguments[name] for name in names), enable_io_processing=False)
            lengths.add(len(found) if isinstance(found, tuple | list | Tensor) else None)
    return lengths.pop() if len(lengths) == 1 else None
