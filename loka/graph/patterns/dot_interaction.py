"""Dot interactions of a DLRM (arXiv 1906.00091): the products of all pairs of a sample's embeddings, in one kernel.

transposed = x.transpose(1, 2)   # x (B, n, d), B the batch
products = x @ transposed        # (B, n, n); gathering pairs out of them is left to the compiler

They are found in canonical form (`loka.graph.canonical`), in which products have this form however they are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from loka.graph.ir import DotInteraction, ForwardIR, Shape
from loka.graph.patterns.fm_interaction import factors_of, transposed_from
from loka.graph.patterns.linear_chain import readers_of


def find_dot_interactions(forward: ForwardIR, shapes: Mapping[str, Shape]) -> tuple[DotInteraction, ...]:
    """The dot interactions of a forward; `shapes` are those of the targets and arguments."""
    return tuple(_found(forward, shapes))


def _found(forward: ForwardIR, shapes: Mapping[str, Shape]) -> Iterator[DotInteraction]:
    readers = readers_of(forward)
    places = {step.target: place for place, step in enumerate(forward.statements)}
    for product, step in enumerate(forward.statements):
        x, transposed = factors_of(step)
        place = places.get(transposed or "")
        if x is None or place is None or transposed_from(forward.statements[place]) != x:
            continue
        shape = shapes.get(x, ())
        if len(shape) == 3 and shape[0] is None and None not in shape[1:]:
            skipped = (place,) if readers[forward.statements[place].target] == {product} else ()
            yield DotInteraction(product, skipped, x, (shape[1] or 0, shape[2] or 0))
