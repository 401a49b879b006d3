"""What of the canonical graph the results of a forward need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from loka.graph.canonical.layout import merged, rows_of, size_of, translated
from loka.graph.canonical.lowering import Lowered
from loka.graph.canonical.nodes import Activation, Concatenation, Linear, Node, Norm, Pair, Part, Product, Value


def shared_products(graph: Lowered, roots: Iterable[int], results: Iterable[Node]) -> frozenset[Node]:
    """The products with weights that something reads besides the sum with their bias.

    `roots` are the places of statements with effects, `results` the nodes that the forward returns.
    """
    read = (value.node for place in roots for value in graph.read[place].values())
    waiting = [*read, *results]
    live: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in live:
            live.add(node)
            waiting += _read_by(node, graph)
    return frozenset(
        each.unbiased for each in live if isinstance(each, Linear) and each.unbiased in live if each.unbiased
    )


def _read_by(node: Node, graph: Lowered) -> Iterator[Node]:
    match node:
        case Linear():
            yield node.x
        case Product():
            yield from (node.left, node.right)
        case Pair():
            yield from (operand.node for operand in node.operands)
        case Norm() | Activation():
            yield node.x
        case Concatenation():
            yield from (part.node for part in node.parts)
        case _:
            if isinstance(node, Part):
                yield node.of.node
            for place in graph.holders.get(node, ())[:1]:
                yield from (value.node for value in graph.read[place].values())


def embeddings_of(graph: Lowered) -> dict[Node, Value]:
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
