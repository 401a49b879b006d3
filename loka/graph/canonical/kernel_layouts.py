"""The layouts in which kernels take and make what a canonical graph has: rows of all columns, the samples first."""

from __future__ import annotations

from collections.abc import Sequence

from loka.graph.canonical.layout import (
    Piece,
    Size,
    is_fixed,
    is_within,
    merged,
    over,
    regrouped,
    rows_of,
    size_of,
    steps_along,
    total,
    translated,
)
from loka.graph.canonical.lowering import Lowered
from loka.graph.canonical.nodes import Activation, Concatenation, Linear, Node, Norm, Pair, Product, Value, is_weight
from loka.graph.canonical.views import CannotEmitError


class KernelLayouts:
    """Layouts of the nodes of one graph.

    `embeddings` has those of each mixing layer, as (samples, embeddings, dimension).
    """

    def __init__(self, graph: Lowered) -> None:
        self._graph = graph
        self._of_gemm: dict[Node, bool] = {}
        self.embeddings = _embeddings_of(graph)

    def is_mixed(self, node: Linear) -> bool:
        """True for a product of the embeddings of a mixing layer, along these."""
        found = self.embeddings.get(node.x)
        return found is not None and merged(node.k) == found.dims[1]

    def is_of_gemm(self, node: Node) -> bool:
        """True for a product with a weight, and for a sum, product, norm or activation of one."""
        if node not in self._of_gemm:
            inner = [each.node for each in node.operands] if isinstance(node, Pair) else []
            inner += [node.x] if isinstance(node, Norm | Activation) else []
            self._of_gemm[node] = isinstance(node, Linear) or any(map(self.is_of_gemm, inner))
        return self._of_gemm[node]

    def shown(self, node: Node) -> list[Value]:
        """The tensors in which the traced statements have a node, in order."""
        made = (self._graph.made[place] for place in self._graph.holders.get(node, []))
        return [value for value in made if value is not None]

    def product(self, node: Linear, value: Value) -> Value:
        """Rows of all columns, with the dimensions that are asked for, or that the forward has, where that fits."""
        candidates = [value, *self.shown(node)]
        embeddings = self.embeddings.get(node.x)
        if embeddings is not None and self.is_mixed(node):
            shape = (embeddings.shape[0], embeddings.shape[2], node.shape[-1])
            dims = regrouped([piece for dim in rows_of(node.shape) for piece in dim], shape)
            candidates += [] if dims is None else [Value(node, dims, shape)]
        return _product_layout(node, candidates)

    def pair(self, value: Value) -> Value:
        """The layout of a sum or product: the wanted one, if the product with a weight in it can have that."""
        node: Node = value.node
        while isinstance(node, Pair | Activation):
            if isinstance(node, Activation):
                node = node.x
                continue
            inner = [each for each in node.operands if each.node.shape == node.shape and not is_weight(each.node)]
            same = [each.node for each in inner if all(s.stride == s.other for s in each.steps)]
            of_gemm = [each for each in same if self.is_of_gemm(each) and not isinstance(each, Norm)]
            joined = value.dims and any(isinstance(each.node, Concatenation) for each in node.operands)
            if joined or not of_gemm:
                return value
            node = next((each for each in of_gemm if isinstance(each, Linear)), of_gemm[0])
        if not isinstance(node, Linear):
            return value
        found = self.product(node, Value(node, value.dims, value.shape))
        return Value(value.node, found.dims, found.shape)

    def activation(self, node: Activation, value: Value) -> Value:
        """That of what it is of."""
        made = self.pair(value)
        of = Value(node.x, made.dims, made.shape)
        if isinstance(node.x, Linear):
            of = self.product(node.x, of)
        elif isinstance(node.x, Norm):  # of the rows, of which blocks are a view
            of = self.norm(node.x, of) if self.blocks(node.x) is None else self.pair(Value(node.x.x, (), ()))
        return Value(node, of.dims, of.shape)

    def norm(self, node: Norm, value: Value) -> Value:
        """The layout of a norm: what it is over is the last dimension. Raises CannotEmitError."""
        blocks = self.blocks(node)
        if blocks is not None:
            return blocks
        along, runs = merged(node.over), len(node.shape[0])
        x = node.x
        joined = isinstance(x, Concatenation) or (
            isinstance(x, Pair) and any(isinstance(each.node, Concatenation) for each in x.operands)
        )
        ordered = not joined or all(is_fixed(size) for size in value.shape[1:])
        plain = value.dims and all(value.dims)  # no dimension of one element
        if plain and value.dims[-1] == along and is_fixed(value.shape[-1]) and ordered:
            return value
        for each in (*self.shown(node), value):
            pairs = list(zip(each.dims, each.shape, strict=True))
            lead = [pair for pair in pairs if pair[0] and not is_within(pair[0], along)]
            inside = [pair[0] for pair in pairs if pair[0] and pair not in lead]
            if not inside or total((piece.size for dim in inside for piece in dim), runs) != size_of(along, runs):
                continue
            # The samples come first, then what is outer in the value.
            lead.sort(key=lambda pair: (not is_fixed(pair[1]), pair[0][0].stride), reverse=True)
            dims, shape = tuple(pair[0] for pair in lead), tuple(pair[1] for pair in lead)
            return Value(node, (*dims, along), (*shape, size_of(along, runs)))
        raise CannotEmitError

    def blocks(self, node: Norm) -> Value | None:
        """The layout of a norm over blocks of the columns of a product: (rows, blocks, columns of a block)."""
        whole = self.pair(Value(node.x, (), ()))
        if not whole.dims or len(node.over) != 1:
            return None
        (block,), n = node.over, whole.shape[-1]
        count = over(n, block.size)
        one = (1,) * len(n)
        if count is None or count == one or whole.dims[-1] != (Piece(n, one),) or block.stride != one:
            return None
        dims = (*whole.dims[:-1], (Piece(count, block.size),), (block,))
        return Value(node, dims, (*whole.shape[:-1], count, block.size))

    def without_cast(self, value: Value) -> Value:
        """What a norm reads before it is cast: it computes in float32, whatever that is."""
        of = self._graph.casts.get(value.node)
        steps = None if of is None else steps_along(rows_of(value.node.shape), of.dims, value.node.shape)
        dims = None if steps is None else translated(value.dims, steps)
        return value if of is None or dims is None else Value(of.node, dims, value.shape)


def _embeddings_of(graph: Lowered) -> dict[Node, Value]:
    """The embeddings of each mixing layer, x @ (x^T @ rank), as (samples, embeddings, dimension)."""
    found: dict[Node, Value] = {}
    for node in graph.holders:
        inner = node.right if isinstance(node, Product) else None
        if not isinstance(node, Product) or not isinstance(inner, Linear) or inner.x is not node.left:
            continue
        x, frame = node.left, rows_of(node.shape)
        samples, n, d = translated(frame[:1], node.batch[0]), translated(frame[1:2], node.rows), merged(node.k[0])
        if samples is None or n is None or merged(inner.k) != n[0] or not (samples[0] and d):
            continue
        dims = (samples[0], n[0], d)
        found.setdefault(x, Value(x, dims, tuple(size_of(dim, len(node.shape[0])) for dim in dims)))
    return found


def _product_layout(node: Linear, candidates: Sequence[Value]) -> Value:
    """The first candidate that shows the rows of a product with all its columns; the rows as they are without one."""
    own: list[Size] = list(node.shape)

    def fits(each: Value) -> bool:
        if not all(each.dims[:-1]):  # of one element, or broadcast
            return False
        last = rows_of(own[-1:])
        columns = each.dims[-1:] == last and each.shape[-1:] == (own[-1],) and is_fixed(own[-1])
        return columns and regrouped([piece for dim in rows_of(own) for piece in dim], each.shape) == each.dims

    return next((each for each in candidates if fits(each)), Value(node, rows_of(own), tuple(own)))
