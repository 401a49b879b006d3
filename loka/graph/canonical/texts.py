"""Texts of views and of weights: a Parameter, a part of it or a view of it, as an expression on the owner."""

from __future__ import annotations

from collections.abc import Sequence

from loka.graph.canonical.layout import Size, is_fixed, move, rows_of
from loka.graph.canonical.nodes import Node, Parameter, Part, Value


class CannotEmitError(Exception):
    """A value that no statement of ours makes: the forward stays as it was traced."""


def _sizes(shape: Sequence[Size]) -> list[str]:
    varying = [place for place, size in enumerate(shape) if not is_fixed(size)]
    if len(varying) > 1:
        raise CannotEmitError
    return ["-1" if place in varying else str(size[0]) for place, size in enumerate(shape)]


def reshape_text(shape: Sequence[Size], to: Sequence[Size]) -> str:
    """The text of a view from one shape to another."""
    one = (1,) * len((*shape, *to)[0])
    if shape and (*shape[:-1], one, *shape[-1:]) == tuple(to):  # one block
        return f"{{0}}.unflatten(-1, (1, {_sizes(shape[-1:])[0]}))"
    if to and (one, *to) == tuple(shape):
        return "{0}.squeeze(0)"
    if (*to, one) == tuple(shape) and to:
        return "{0}.flatten(-2)"
    if to and (*to[:-1], one, *to[-1:]) == tuple(shape):
        return "{0}.flatten(-2)"
    lead = 0
    while lead < min(len(shape), len(to)) and shape[lead] == to[lead]:
        lead += 1
    tail = 0
    while tail < min(len(shape), len(to)) - lead and shape[-1 - tail] == to[-1 - tail]:
        tail += 1
    before, after = len(shape) - lead - tail, len(to) - lead - tail
    whole = tail == 0  # the last dimensions: counted from the end, as patterns read them
    if after == 1 and before > 1:
        return f"{{0}}.flatten({-before})" if whole else f"{{0}}.flatten({lead}, {lead + before - 1})"
    if before == 1 and after > 1 and sum(not is_fixed(size) for size in to[lead : lead + after]) < 2:
        return f"{{0}}.unflatten({-1 if whole else lead}, ({', '.join(_sizes(to[lead : lead + after]))}))"
    return f"{{0}}.reshape({', '.join(_sizes(to))})"


def permutation_text(order: Sequence[int]) -> str:
    """The text of a view with its dimensions in another order."""
    moved = [place for place, each in enumerate(order) if place != each]
    if tuple(order) == (1, 0):
        return "{0}.t()"
    if len(moved) == 2:
        return f"{{0}}.transpose({moved[0]}, {moved[1]})"
    return f"{{0}}.permute({', '.join(map(str, order))})"


def weight_text(value: Value) -> tuple[str, bool] | None:
    """The expression of a weight in a layout, and whether it is the transpose of that; None where there is none."""
    base = _base_text(value.node)
    if base is None:
        return None
    natural = Value(value.node, rows_of(value.node.shape), value.node.shape)
    straight = viewed_text(base, natural, value)
    if len(value.dims) != 2 or (straight is not None and straight.count(".") == base.count(".")):
        return None if straight is None else (straight, False)
    turned = viewed_text(base, natural, Value(value.node, value.dims[::-1], value.shape[::-1]))
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
    base = None if of is None else viewed_text(of, natural, node.of)
    if base is None:
        return None
    if node.selected and node.dim == 0:
        return f"{base}[{node.start}]"
    if node.selected:
        return f"{base}.select({node.dim}, {node.start})"
    before = ":, " * node.dim
    return f"{base}[{before}{node.start}:{node.start + node.length}]"


def viewed_text(text: str, first: Value, wanted: Value) -> str | None:
    """The text of a tensor, given that of one in another layout; None where that is no view or copy of it."""
    step = move(first.dims, wanted.dims, first.shape, wanted.shape)
    if step is None:
        return None
    shape: Sequence[Size] = first.shape
    if step.before is not None:
        text, shape = reshape_text(shape, step.before).format(text), step.before
    if step.order is not None:
        text, shape = permutation_text(step.order).format(text), tuple(shape[place] for place in step.order)
    return text if step.after is None else reshape_text(shape, step.after).format(text)
