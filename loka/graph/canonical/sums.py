"""Sums and products of two tensors in the canonical graph; a product with a bias is one linear."""

from __future__ import annotations

from dataclasses import replace

from loka.graph.canonical.layout import Dims, Piece, Size, Step, merged, rows_of, size_of, steps_along
from loka.graph.canonical.nodes import (
    Activation,
    Graph,
    Linear,
    Node,
    Norm,
    Operand,
    Pair,
    Parameter,
    Part,
    Source,
    Value,
    is_weight,
)
from loka.graph.canonical.products import Unsupported


class Sums:
    """Sums and products of two tensors as nodes of a graph, for a number of runs."""

    def __init__(self, graph: Graph, count: int) -> None:
        self._graph, self._count = graph, count
        self._ranks: dict[Node, int] = {}

    def pair(self, op: str, a: Value, b: Value, shape: tuple[Size, ...], place: int, cast: int | None = None) -> Value:
        """A sum or a product of two tensors that are broadcast to a shape; `cast` is that of `Pair`."""
        full = [each for each in (a, b) if _is_full(each, shape) and not is_weight(each.node)]
        anchor = min(full, key=self._rank, default=None)
        dims, node = (anchor.dims, anchor.node) if anchor is not None else (rows_of(shape), None)
        operands: list[Operand] = []
        for each in (a, b):
            if node is not None and each.node is node and each.dims == dims:
                operands.append(Operand(node, _identity(node)))
                continue
            steps = steps_along(dims, each.dims, shape)
            if steps is None:
                raise Unsupported
            operands.append(Operand(each.node, steps))
        frame = shape if node is None else node.shape
        made = Pair(shape=frame, place=place, op=op, operands=(operands[0], operands[1]), cast=cast)
        key = (op, frozenset((each.node, each.steps) for each in operands), node, cast)
        found = Value(self._graph.one(made, *key), dims, shape)
        return (self._biased(found, a, b) or found) if op == "add" else found

    def _biased(self, found: Value, a: Value, b: Value) -> Value | None:
        """A product with a weight and a bias of its columns, as one linear; None for other sums."""
        for product, bias in ((a, b), (b, a)):
            node = product.node
            if not isinstance(node, Linear) or node.bias is not None or not is_weight(bias.node):
                continue
            pair = found.node
            steps = next((e.steps for e in pair.operands if e.node is bias.node), ()) if isinstance(pair, Pair) else ()
            real = [step for step in steps if any(step.other)]
            n = node.shape[-1]
            inside = size_of(tuple(Piece(step.size, step.stride) for step in real), self._count) == n
            if not inside or not all(all(e <= m for e, m in zip(step.end, n, strict=True)) for step in real):
                continue
            vector = Value(bias.node, (merged(Piece(step.size, step.other) for step in real),), (n,))
            made = self._graph.one(replace(node, bias=vector, unbiased=node))
            return Value(made, found.dims, found.shape)
        return None

    def _rank(self, value: Value) -> int:
        """Whose layout a sum or product of two tensors keeps: that of a product with a weight before all others."""
        node = value.node
        if node not in self._ranks:
            inner = [node.x] if isinstance(node, Activation | Norm) else []
            if isinstance(node, Pair):
                inner = [each.node for each in node.operands if not is_weight(each.node)]
            alone = 0 if isinstance(node, Linear) else 2 if isinstance(node, Pair | Source | Part | Parameter) else 1
            self._ranks[node] = min((self._rank(Value(each, (), ())) for each in inner), default=alone)
        return self._ranks[node]


def _is_full(value: Value, shape: tuple[Size, ...]) -> bool:
    same = value.shape == shape
    return same and all(size_of(dim, len(size)) == size for dim, size in zip(value.dims, shape, strict=True))


def _identity(node: Node) -> tuple[Step, ...]:
    """A node along its own elements."""
    shape: Dims = rows_of(node.shape)
    found = steps_along(shape, shape, node.shape)
    return found or ()
