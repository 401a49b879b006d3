"""Values of traced operations in the known calls."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from loka.graph.trace.call_values import EntryValues, ValuesNeededError, computed_values, is_size
from loka.graph.trace.examples import ExampleCall


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 2))
        self.scale = 0.5

    def forward(self, x: Tensor, more: dict[str, Tensor], width: int = 4) -> Tensor:
        size = x.shape[0] * width + more["y"].dim()
        other = more.get("z")
        return x.sum(0, keepdim=True) @ self.w.mT * size * (other == None) * x[0, 0]  # noqa: E711


def traced() -> tuple[nn.Module, fx.Graph, list[ExampleCall]]:
    module = Reads()
    calls = [ExampleCall(rows, (torch.ones(rows, 2), {"y": torch.ones(rows)}), {}) for rows in (2, 5)]
    return module, fx.symbolic_trace(module).graph, calls


def test_what_a_forward_can_read_where_it_starts() -> None:
    module, graph, calls = traced()
    entry = EntryValues(module, calls)
    found = {node.name: entry.of(node) for node in graph.nodes if node.op != "output"}
    assert found["width"] == (4, 4)
    assert found["mul"] == (8, 20)
    assert found["add"] == (9, 21)
    assert found["get"] == (None, None)
    assert found["eq"] == (True, True)
    assert found["w"] is not None
    assert found["w"][0] is module.w
    for name in ("sum_1", "matmul", "getattr_2", "getitem_2"):
        assert found[name] is None, name


def test_sizes_are_known_by_their_operations() -> None:
    _, graph, _ = traced()
    assert [node.name for node in graph.nodes if is_size(node)] == ["getattr_1", "getitem", "dim"]


def test_a_value_that_is_missing_in_a_call_cannot_be_read() -> None:
    module, graph, calls = traced()
    calls[1].args[1].clear()
    entry = EntryValues(module, calls)
    assert entry.of(next(node for node in graph.nodes if node.name == "getitem_1")) is None


def test_computed_values_are_those_of_each_call() -> None:
    module, graph, calls = traced()
    graph.erase_node(graph.output_node())  # as while it is traced
    node = next(node for node in graph.nodes if node.name == "sum_1")
    found = computed_values(module, ValuesNeededError(graph, node), calls)
    assert tuple(value[0, 0] for value in found) == (2, 5)
