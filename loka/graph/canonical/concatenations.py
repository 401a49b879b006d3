"""Concatenations in the canonical graph: what their parts have in common is that of the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loka.graph.canonical.layout import Dims, Piece, Size, merged, rows_of, size_of, times, total
from loka.graph.canonical.nodes import Concatenation, Graph, Node, Pair, Part, Value
from loka.graph.canonical.products import operand_value

_Add = Callable[[str, Value, Value, "tuple[Size, ...]", int], Value]


def concatenated(
    values: Sequence[Value], dim: int, shape: tuple[Size, ...], place: int, graph: Graph, pair: _Add
) -> Value:
    """Tensors side by side along a dimension.

    All parts of one tensor are that tensor; sums with the parts of one tensor are the sum with that tensor.
    """
    whole = _whole(values, dim, shape)
    if whole is not None:
        return whole
    if len(values) > 1:
        found = _added(values, dim, shape, place, graph, pair)
        if found is not None:
            return found
    node = graph.one(Concatenation(shape=shape, place=place, parts=tuple(values), dim=dim))
    return Value(node, rows_of(shape), shape)


def _whole(values: Sequence[Value], dim: int, shape: tuple[Size, ...]) -> Value | None:
    """The tensor of which these are all parts, in order; None where they are not."""
    if len(values) == 1 and values[0].shape == shape:
        return values[0]
    bases = [_on_base(each) for each in values]
    first = bases[0]
    if first is None or any(each is None or each[0] is not first[0] for each in bases):
        return None
    node, _, dims = first
    starts = [each[1] for each in bases if each is not None]
    others = [(*each[2][:dim], *each[2][dim + 1 :]) for each in bases if each is not None]
    if any(each != others[0] for each in others) or any(starts[0]):
        return None
    along = _side_by_side([each[2][dim] for each in bases if each is not None], starts)
    made: Dims = () if along is None else (*dims[:dim], along, *dims[dim + 1 :])
    runs = len(shape[0])
    covers = along is not None and total((size_of(each, runs) for each in made), runs) == total(node.shape, runs)
    return Value(node, made, shape) if covers else None


def _side_by_side(parts: Sequence[tuple[Piece, ...]], starts: Sequence[Size]) -> tuple[Piece, ...] | None:
    """The dimension that these parts make, which start at these elements of one value."""
    runs = len(starts[0])
    if len(starts) > 1 and all(part == parts[0] for part in parts):
        step = tuple(b - a for a, b in zip(starts[0], starts[1], strict=True))
        even = all(s == tuple(each * n for each in step) for n, s in enumerate(starts))
        if even and all(each > 0 for each in step):
            return merged((Piece((len(parts),) * runs, step), *parts[0]))
    if any(len(part) != 1 for part in parts):
        return None
    end, count = starts[0], (0,) * runs
    for (piece,), start in zip(parts, starts, strict=True):
        if piece.stride != parts[0][0].stride or start != end:
            return None
        end = tuple(a + b for a, b in zip(end, times(piece.size, piece.stride), strict=True))
        count = tuple(a + b for a, b in zip(count, piece.size, strict=True))
    return (Piece(count, parts[0][0].stride),)


def _on_base(value: Value) -> tuple[Node, Size, Dims] | None:
    """A part of a tensor as elements of that tensor's node: where they start, and its dimensions there."""
    node = value.node
    if not isinstance(node, Part):
        return None
    base = node.of.dims[node.dim]
    runs = len(node.of.shape[node.dim])
    if len(base) != 1:
        return None
    own = [
        (Piece((node.length,) * runs, base[0].stride),) if place == node.dim else dim
        for place, dim in enumerate(node.of.dims)
        if place != node.dim or not node.selected
    ]
    start = times((node.start,) * runs, base[0].stride)
    frame = rows_of(node.shape)
    pairs = {dim: merged(mine) for dim, mine in zip(frame, own, strict=True) if dim}
    made: list[tuple[Piece, ...]] = []
    for dim in value.dims:
        if dim == ():
            made.append(())
        elif dim in pairs:
            made.append(pairs[dim])
        else:
            return None
    return node.of.node, start, tuple(made)


def _added(
    values: Sequence[Value], dim: int, shape: tuple[Size, ...], place: int, graph: Graph, pair: _Add
) -> Value | None:
    """Sums with the parts of one tensor as the sum with it; None for other parts."""
    sums: list[list[Value]] = []
    for each in values:
        node = each.node
        if not isinstance(node, Pair) or node.op != "add":
            return None
        terms = [operand_value(operand, each) for operand in node.operands]
        if any(term is None for term in terms):
            return None
        sums.append([term for term in terms if term is not None])
    for mine in (0, 1):
        residuals, others = list[Value](), list[Value]()
        for first, second in sums:
            pair_of = (first, second) if mine == 0 else (second, first)
            if not isinstance(pair_of[0].node, Part):
                pair_of = pair_of[::-1]
            residuals.append(pair_of[0])
            others.append(pair_of[1])
        whole = _whole(residuals, dim, shape)
        if whole is not None:
            rest = concatenated(others, dim, shape, place, graph, pair)
            return pair("add", rest, whole, shape, place)
    return None
