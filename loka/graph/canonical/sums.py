"""Sums and products of two tensors in the canonical graph; with a bias, or a common factor, they are simpler."""

from __future__ import annotations

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
from loka.graph.canonical.products import Unsupported, operand_value


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
        found = Value(self._graph.one(key, made), dims, shape)
        return (self._biased(found, a, b) or self._factored(found, shape, place) or found) if op == "add" else found

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
            made = Linear(
                shape=node.shape, place=node.place, x=node.x, rows=node.rows, k=node.k, weight=node.weight,
                weight_n=node.weight_n, weight_k=node.weight_k, site=node.site, bias=vector, unbiased=node,
                kind=node.kind,
            )  # fmt: skip
            key = (node, vector.node, vector.dims)
            return Value(self._graph.one(key, made), found.dims, found.shape)
        return None

    def _factored(self, found: Value, shape: tuple[Size, ...], place: int) -> Value | None:
        """x0 * u + x0 * bias, perhaps with a further term, as x0 * (u + bias) for a product u; None for others."""
        pair = found.node
        if not isinstance(pair, Pair):
            return None
        terms = [operand_value(each, found) for each in pair.operands]
        if None in terms:
            return None
        for first, second in (terms, terms[::-1]):
            if first is None or second is None or not isinstance(second.node, Pair):
                continue
            whole = self._common_factor(first, second, shape, place)
            if whole is not None:
                return whole
            inner = first.node
            if not isinstance(inner, Pair) or inner.op != "add":
                continue
            parts = [operand_value(each, first) for each in inner.operands]
            for rest, term in (parts, parts[::-1]):
                whole = None if term is None else self._common_factor(term, second, shape, place)
                if whole is not None and rest is not None:
                    return self.pair("add", rest, whole, shape, place)
        return None

    def _common_factor(self, a: Value, b: Value, shape: tuple[Size, ...], place: int) -> Value | None:
        if not all(isinstance(each.node, Pair) and each.node.op == "mul" for each in (a, b)):
            return None
        factors = []
        for each in (a, b):
            operands = each.node.operands if isinstance(each.node, Pair) else ()
            factors.append([operand_value(operand, each) for operand in operands])
        for x, u in (factors[0], factors[0][::-1]):
            for y, bias in (factors[1], factors[1][::-1]):
                if x is None or y is None or u is None or bias is None or (x.node, x.dims) != (y.node, y.dims):
                    continue
                if isinstance(u.node, Linear) and u.node.bias is None and is_weight(bias.node):
                    total = self.pair("add", u, bias, shape, place)
                    if isinstance(total.node, Linear):
                        return self.pair("mul", x, total, shape, place)
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
