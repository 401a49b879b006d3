"""New tensors that slices fill, which are concatenations: `y = x.new_empty(...); y[:, :4] = a; y[:, 4:] = b`."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

_MAKES = frozenset({"empty", "zeros", "ones", "full", "clone"})
_NEW = _MAKES | {f"{name}_like" for name in _MAKES} | {f"new_{name}" for name in _MAKES}


@dataclass(frozen=True, slots=True)
class Fill:
    """A new tensor that is written slice by slice before anything else reads it, and all of it."""

    tensor: fx.Node
    writes: tuple[fx.Node, ...]  # in the order of the graph
    pieces: tuple[fx.Node, ...]  # what is written, in the order of the slices
    single: tuple[bool, ...]  # pieces without the dimension, written at an index
    dim: int

    @property
    def inside(self) -> tuple[fx.Node, ...]:
        """The operations that the concatenation replaces, but for the last write."""
        return (self.tensor, *self.writes[:-1])


def fills(graph: fx.Graph) -> Iterator[Fill]:
    """The fills in a captured graph."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        found = _fill(node, order)
        if found is not None:
            yield found


def _fill(node: fx.Node, order: dict[fx.Node, int]) -> Fill | None:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    value = node.meta.get("example_value")
    if not node.op.startswith("call") or name not in _NEW or not isinstance(value, Tensor):
        return None
    users = sorted(node.users, key=order.__getitem__)
    writes = [user for user in users if user.target is operator.setitem and user.args[0] is node]
    if not writes or users[: len(writes)] != writes:
        return None
    slices = [_slice(write.args[1], value.shape) for write in writes]
    dims = {each[0] for each in slices if each is not None}
    if None in slices or len(dims) != 1:
        return None
    (dim,) = dims
    placed = sorted(zip(slices, writes, strict=True), key=lambda each: each[0][1])  # type: ignore[index]
    ends = [0, *(each[2] for each, _ in placed if each is not None)]
    starts = [each[1] for each, _ in placed if each is not None]
    pieces = [write.args[2] for _, write in placed]
    single = [each is not None and each[3] for each, _ in placed]
    if starts != ends[:-1] or ends[-1] != _number(value.shape[dim]):
        return None
    for piece, one, start, end in zip(pieces, single, starts, ends[1:], strict=True):
        shape = [*value.shape[:dim], *([] if one else [end - start]), *value.shape[dim + 1 :]]
        given = piece.meta.get("example_value") if isinstance(piece, fx.Node) else None
        if not isinstance(given, Tensor) or [str(_size(n)) for n in given.shape] != [str(_size(n)) for n in shape]:
            return None
    return Fill(node, tuple(writes), tuple(p for p in pieces if isinstance(p, fx.Node)), tuple(single), dim)


def _slice(index: Any, shape: Sequence[Any]) -> tuple[int, int, int, bool] | None:
    """Dimension, start, end and whether it is one index, of a slice along one dimension; None for any other index."""
    items = list(index) if isinstance(index, tuple) else [index]
    if items.count(...) == 1:
        place = items.index(...)
        items[place : place + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    taken = [dim for dim, item in enumerate(items) if item != slice(None)]
    if len(taken) != 1 or len(items) > len(shape):
        return None
    (dim,) = taken
    item, size = _number(items[dim]), _number(shape[dim])
    if size is None:
        return None
    if type(item) is int and -size <= item < size:
        return dim, item % size, item % size + 1, True
    if not isinstance(item, slice) or item.step not in (None, 1):
        return None
    given = [each for each in (item.start, item.stop) if each is not None]
    if any(_number(each) is None for each in given):
        return None
    start, stop, _ = slice(_number(item.start), _number(item.stop)).indices(size)
    return dim, start, stop, False


def _size(size: Any) -> Any:
    """A size that tells equal ones: its number, or its symbols."""
    number = _number(size)
    return size if number is None else number


def _number(value: Any) -> Any:
    """A size as a number where a capture knows it; None for one that may vary. Anything else as it is."""
    value = value.meta.get("example_value") if isinstance(value, fx.Node) else value
    return value.node.maybe_as_int() if isinstance(value, torch.SymInt) else value
