"""Lengths of traced loops: the number of items, or a dict's keys, where they are the same in all known calls."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from loka.graph.trace.examples import ExampleCall, copy_tree

VIEWS_OF_DICT = ("keys", "values", "items")
Length = int | tuple[str | int, ...] | None


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


def dict_of(node: fx.Node) -> fx.Node:
    """The dict whose keys, values or items a node is; the node itself if it is nothing of that."""
    of_dict = node.op == "call_method" and node.target in VIEWS_OF_DICT and len(node.args) == 1 and not node.kwargs
    return node.all_input_nodes[0] if of_dict else node


def length_of(module: nn.Module, loop: LoopError, calls: Sequence[ExampleCall]) -> Length:
    """Number of items of the loop in all calls, or the keys of the dict; None where they differ, or for other values.

    Runs the operations traced before the loop on `module`, which may change its buffers. Their exceptions are passed
    on.
    """
    before = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in loop.graph.nodes:
        copies[node] = before.node_copy(node, copies.__getitem__)
    before.output(copies[dict_of(loop.node)])
    run = fx.Interpreter(module, graph=before).run
    names = [str(node.target) for node in before.nodes if node.op == "placeholder"]
    lengths: set[Length] = set()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for call in calls:
            given = inspect.signature(module.forward).bind(*copy_tree(call.args), **copy_tree(call.kwargs))
            given.apply_defaults()
            found = run(*(given.arguments[name] for name in names), enable_io_processing=False)
            plain = isinstance(found, dict) and all(type(key) in (str, int) for key in found)
            countable = isinstance(found, tuple | list | Tensor) and dict_of(loop.node) is loop.node
            lengths.add(tuple(found) if plain else len(found) if countable else None)
    return lengths.pop() if len(lengths) == 1 else None
