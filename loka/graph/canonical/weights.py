"""Texts of weights: a Parameter, a part of it or a view, as an expression on the owner."""

from __future__ import annotations

from collections.abc import Sequence

from loka.graph.canonical.layout import Size, move, rows_of
from loka.graph.canonical.nodes import Node, Parameter, Part, Value
from loka.graph.canonical.views import permutation_text, reshape_text


def weight_text(value: Value) -> tuple[str, bool] | None:
    """The expression of a weight in a layout, and whether it is the transpose of that; None where there is none."""
    base = _base_text(value.node)
    if base is None:
        return None
    natural = Value(value.node, rows_of(value.node.shape), value.node.shape)
    straight = _viewed(base, natural, value)
    if len(value.dims) != 2 or (straight is not None and straight.count(".") == base.count(".")):
        return None if straight is None else (straight, False)
    turned = _viewed(base, natural, Value(value.node, value.dims[::-1], value.shape[::-1]))
    if turned is not None and (straight is None or turned.count(".") < straight.count(".")):
        return turned, True
    return None if straight is None else (straight, False)


def _base_text(node: Node) -> str | None:
    if isinstance(node, Parameter):
        return node.name
    if not isinstance(node, Part):
        return None
    of = _base_text(node.of.node)
    natural = Value(node.of.node, rows_of(node.of.node.shape), node.of.node.shape)
    base = None if of is None else _viewed(of, natural, node.of)
    if base is None:
        return None
    if node.selected and node.dim == 0:
        return f"{base}[{node.start}]"
    if node.selected:
        return f"{base}.select({node.dim}, {node.start})"
    before = ":, " * node.dim
    return f"{base}[{before}{node.start}:{node.start + node.length}]"


def _viewed(text: str, first: Value, wanted: Value) -> str | None:
    step = move(first.dims, wanted.dims, first.shape, wanted.shape)
    if step is None:
        return None
    shape: Sequence[Size] = first.shape
    if step.before is not None:
        text, shape = reshape_text(shape, step.before).format(text), step.before
    if step.order is not None:
        text, shape = permutation_text(step.order).format(text), tuple(shape[place] for place in step.order)
    return text if step.after is None else reshape_text(shape, step.after).format(text)
