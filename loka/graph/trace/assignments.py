"""Assignments into slices of a new tensor that together fill it, recorded as the concatenation that they are.

`out = x.new_empty(b, n, d); out[:, :k] = a; out[:, k:] = b` is `out = torch.cat([a, b], 1)`, in the dtype of x; and
`out = x.clone(); out[:, :k] += a; out[:, k:] += b` is `torch.cat([x[:, :k] + a, x[:, k:] + b], 1)`. Slices fill a
tensor where one begins at 0, each of the others where another ends, and the last at the end.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from loka.graph.refused import CannotTraceError

_CLONES: frozenset[object] = frozenset(("clone", torch.clone))
_LIKE: frozenset[object] = frozenset(("new_empty", "new_zeros", torch.empty_like, torch.zeros_like)) | _CLONES
_SIZED: frozenset[object] = frozenset(("new_empty", "new_zeros", torch.empty, torch.zeros))
_WHAT = "assignment into a tensor"

Bound = int | fx.Node | None  # of a slice; None is the end


@dataclass(frozen=True, slots=True)
class _Slice:
    """A slice along one dimension, or an index, without that dimension."""

    dim: int
    start: Bound
    stop: Bound
    single: bool = False


@dataclass(slots=True)
class _New:
    """A new tensor, and what is assigned to its slices."""

    place: str  # of the first assignment
    parts: dict[_Slice, fx.Proxy] = field(default_factory=dict)
    reads: dict[fx.Node, _Slice] = field(default_factory=dict)  # of a clone's slices, before they are assigned


class Assignments:
    """The assignments into new tensors that are not filled yet, of one trace."""

    def __init__(self) -> None:
        self._new: dict[fx.Node, _New] = {}

    def add(self, proxy: fx.Proxy, index: Any, value: Any, place: str, cast: bool) -> None:
        """Takes `proxy[index] = value`, at `place`. Once the tensor is filled, the proxy is the concatenation.

        `cast`: in the dtype of the tensor, whatever that of the parts is. Raises CannotTraceError where the tensor is
        not new, or the assignment is no part of a concatenation.
        """
        node, part = proxy.node, _sliced(index)
        if not _is_new(node):
            raise CannotTraceError(f"{_WHAT} {place}")
        if part is None or not isinstance(value, fx.Proxy):
            what = "by an index that is no slice along one dimension" if part is None else "of what is no tensor"
            raise CannotTraceError(f"{_WHAT}, {what} {place}")
        new = self._new.setdefault(node, _New(place))
        for reader in node.users:
            found = _read(reader, node)
            if found is None or (reader not in new.reads and found in new.parts):
                raise CannotTraceError(f"{_WHAT}, which is read before its slices fill it {place}")
            if cast:  # `out[:, :k] += a` is a sum in place then, of the clone
                raise CannotTraceError(f"{_WHAT}, whose slices are in another dtype than it {place}")
            new.reads[reader] = found
        if part in new.parts:
            raise CannotTraceError(f"{_WHAT}, twice into the same slice {place}")
        new.parts[part] = value
        ordered = _filling(tuple(new.parts), _size(node, part.dim))
        if ordered and set(new.reads.values()) <= set(ordered):
            proxy.node = _concatenated([(each, new.parts[each]) for each in ordered], node, cast).node
            for reader in new.reads:
                reader.replace_input_with(node, _like(node))
            node.graph.erase_node(node)
            del self._new[node]

    def check(self) -> None:
        """Raises CannotTraceError for the first tensor that was not filled."""
        for new in self._new.values():
            raise CannotTraceError(f"{_WHAT}, whose slices need not fill it {new.place}")


def _is_new(node: fx.Node) -> bool:
    made = node.op in ("call_function", "call_method") and node.target in _LIKE | _SIZED
    plain = set(node.kwargs) <= (set() if node.target in _CLONES else {"dtype", "device"})
    like = node.target not in _LIKE or (bool(node.args) and isinstance(node.args[0], fx.Node))
    return made and plain and like and isinstance(node.kwargs.get("device"), fx.Node | None)


def _like(node: fx.Node) -> fx.Node:
    """The tensor that a new one is made like."""
    (source, *_) = node.all_input_nodes
    return source


def _read(reader: fx.Node, node: fx.Node) -> _Slice | None:
    """The slice of a clone that an operation reads; None for another operation."""
    if node.target not in _CLONES or reader.target is not operator.getitem:
        return None
    return _sliced(reader.args[1])


def _sliced(index: Any) -> _Slice | None:
    """The slice along one dimension that an index means; None for other indices."""
    items = list(index) if isinstance(index, tuple) else [index]
    cut = [place for place, item in enumerate(items) if item is not Ellipsis and item != slice(None)]
    dots = [place for place, item in enumerate(items) if item is Ellipsis]
    if len(cut) != 1 or len(dots) > 1:
        return None
    item = items[cut[0]]
    dim = cut[0] - len(items) if dots and dots[0] < cut[0] else cut[0]
    if type(item) is int:
        return _Slice(dim, item, item + 1 if item != -1 else None, single=True)
    if not isinstance(item, slice) or item.step not in (None, 1):
        return None
    start, stop = (each.node if isinstance(each, fx.Proxy) else each for each in (item.start, item.stop))
    known = all(isinstance(each, int | fx.Node | None) for each in (start, stop))
    return _Slice(dim, 0 if start is None else start, stop) if known else None


def _filling(slices: Sequence[_Slice], size: Bound) -> list[_Slice]:
    """The slices in order, if they fill a dimension of this size (None if it is unknown); otherwise ()."""
    starts = {each.start: each for each in slices}
    ordered = list(_chained(starts))
    whole = len(ordered) == len(slices) and ordered[-1].stop in (None, size)
    return ordered if whole and len({each.dim for each in slices}) == 1 else []


def _chained(starts: dict[Bound, _Slice]) -> Iterator[_Slice]:
    """The slice that begins at 0, then each that begins where the last one ends."""
    here = starts.pop(0, None)
    while here is not None:
        yield here
        forward = not (isinstance(here.start, int) and isinstance(here.stop, int)) or here.start < here.stop
        ends_behind = here.start == 0 and isinstance(here.stop, int) and here.stop < 0  # out[:, :-2]
        here = starts.pop(here.stop, None) if here.stop is not None and (forward or ends_behind) else None


def _size(node: fx.Node, dim: int) -> Bound:
    """The size of a dimension of a new tensor, where it is given as one of several numbers."""
    if node.target not in _SIZED:
        return None
    given = node.args[1:] if node.op == "call_method" else node.args
    sizes = given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given
    found = sizes[dim] if len(sizes) > 1 and -len(sizes) <= dim < len(sizes) else None
    return found if isinstance(found, int | fx.Node) else None


def _concatenated(parts: Sequence[tuple[_Slice, fx.Proxy]], node: fx.Node, cast: bool) -> fx.Proxy:
    tracer, dim = parts[0][1].tracer, parts[0][0].dim
    values = [value.unsqueeze(dim) if part.single else value for part, value in parts]
    whole = tracer.create_proxy("call_function", torch.cat, (values, dim), {})
    if not cast:
        return whole
    given = node.kwargs.get("dtype")
    if given is None and node.target in _LIKE:
        return tracer.create_proxy("call_method", "type_as", (whole, fx.Proxy(_like(node), tracer)), {})
    dtype = fx.Proxy(given, tracer) if isinstance(given, fx.Node) else given or torch.get_default_dtype()
    return tracer.create_proxy("call_method", "to", (whole, dtype), {})
