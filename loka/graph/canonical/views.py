"""Views as expressions: a tensor in another layout; a Parameter, or a part of it, as an expression on the owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from loka.graph.canonical.layout import Size, is_fixed, move, rows_of
from loka.graph.canonical.nodes import Node, Parameter, Part, Value
from loka.graph.expression import Arg, Call, Ref, RefKind, method, text_of


class CannotEmitError(Exception):
    """A value that no statement of ours makes: the forward is refused."""


def _sizes(shape: Sequence[Size]) -> tuple[int, ...]:
    varying = [place for place, size in enumerate(shape) if not is_fixed(size)]
    if len(varying) > 1:
        raise CannotEmitError
    return tuple(-1 if place in varying else size[0] for place, size in enumerate(shape))


def reshaped(value: Arg, shape: Sequence[Size], to: Sequence[Size]) -> Call:
    """A tensor of one shape as a view of another. Raises CannotEmitError."""
    one = (1,) * len((*shape, *to)[0])
    if shape and (*shape[:-1], one, *shape[-1:]) == tuple(to):  # one block
        return method(value, "unflatten", -1, (1, *_sizes(shape[-1:])))
    if to and (one, *to) == tuple(shape):
        return method(value, "squeeze", 0)
    if to and tuple(shape) in ((*to, one), (*to[:-1], one, *to[-1:])):
        return method(value, "flatten", -2)
    lead = 0
    while lead < min(len(shape), len(to)) and shape[lead] == to[lead]:
        lead += 1
    tail = 0
    while tail < min(len(shape), len(to)) - lead and shape[-1 - tail] == to[-1 - tail]:
        tail += 1
    before, after = len(shape) - lead - tail, len(to) - lead - tail
    whole = tail == 0  # the last dimensions: counted from the end, as patterns read them
    if after == 1 and before > 1:
        return method(value, "flatten", -before) if whole else method(value, "flatten", lead, lead + before - 1)
    if before == 1 and after > 1 and sum(not is_fixed(size) for size in to[lead : lead + after]) < 2:
        return method(value, "unflatten", -1 if whole else lead, _sizes(to[lead : lead + after]))
    return method(value, "reshape", *_sizes(to))


def permuted(value: Arg, order: Sequence[int]) -> Call:
    """A tensor with its dimensions in another order."""
    moved = [place for place, each in enumerate(order) if place != each]
    if tuple(order) == (1, 0):
        return method(value, "t")
    if len(moved) == 2:
        return method(value, "transpose", *moved)
    return method(value, "permute", *order)


def is_permuted(value: Arg) -> bool:
    """True for what `permuted` makes."""
    return isinstance(value, Call) and value.target in (".t", ".transpose", ".permute")


def weight_ref(value: Value) -> tuple[Ref, bool] | None:
    """A weight in a layout, and whether it is the transpose of that; None where there is no expression of it."""
    base = _base(value.node)
    if base is None:
        return None
    natural = Value(value.node, rows_of(value.node.shape), value.node.shape)
    straight = viewed(base, natural, value)
    found = None if straight is None else (_named(straight), False)
    if len(value.dims) != 2 or straight == base:
        return found
    turned = viewed(base, natural, Value(value.node, value.dims[::-1], value.shape[::-1]))
    if turned is not None and (straight is None or _views_in(turned) < _views_in(straight)):
        return _named(turned), True
    return found


def _named(value: Arg) -> Ref:
    return Ref(RefKind.ATTRIBUTE, text_of(value))


def _views_in(value: Arg) -> int:
    return 1 + _views_in(value.args[0]) if isinstance(value, Call) else 0


def _base(node: Node) -> Arg:
    """The expression of a Parameter, or of a part of one, in its own layout; None for another node."""
    if isinstance(node, Parameter):
        return Ref(RefKind.ATTRIBUTE, node.name)
    if not isinstance(node, Part):
        return None
    of = _base(node.of.node)
    natural = Value(node.of.node, rows_of(node.of.node.shape), node.of.node.shape)
    base = None if of is None else viewed(of, natural, node.of)
    if base is None:
        return None
    if node.selected and node.dim:
        return method(base, "select", node.dim, node.start)
    whole = Call("slice", (None, None, None))
    cut = Call("slice", (node.start, node.start + node.length, None))
    index: Arg = node.start if node.selected else (*(whole,) * node.dim, cut) if node.dim else cut
    return Call("operator.getitem", (base, index))


def viewed(value: Arg, first: Value, wanted: Value) -> Arg:
    """A tensor in another layout, given what it is in the first; None where that is no view or copy of it."""
    steps = moves(first, wanted)
    if steps is None:
        return None
    for change, _ in steps:
        value = change(value)
    return value


def moves(first: Value, wanted: Value) -> list[tuple[Callable[[Arg], Call], tuple[Size, ...]]] | None:
    """The views that make one layout of another, each with the shape of what it makes; None where none do.

    Raises CannotEmitError where a shape cannot be written.
    """
    step = move(first.dims, wanted.dims, first.shape, wanted.shape)
    if step is None:
        return None
    shape = tuple(first.shape)
    made: list[tuple[Callable[[Arg], Call], tuple[Size, ...]]] = []
    if step.before is not None:
        made.append((partial(reshaped, shape=shape, to=step.before), step.before))
        shape = step.before
    if step.order is not None:
        shape = tuple(shape[place] for place in step.order)
        made.append((partial(permuted, order=step.order), shape))
    if step.after is not None:
        made.append((partial(reshaped, shape=shape, to=step.after), step.after))
    return made
