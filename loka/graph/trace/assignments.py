"""Assignments into slices of a new tensor that together fill it, recorded as the concatenation that they are.

`out = x.new_empty(b, n, d); out[:, :k] = a; out[:, k:] = b` is `out = torch.cat([a, b], 1)`, in the dtype of x; and
`out = x.clone(); out[:, :k] += a; out[:, k:] += b` is `x + torch.cat([a, b], 1)`. So are writes by the views of slices,
`out.narrow(1, 0, k).add_(a)`. Slices fill a tensor where one begins at 0, each of the others where another ends, and
the last at the end.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from loka.graph.ir import CannotTraceError

_CLONES: frozenset[object] = frozenset(("clone", torch.clone))
_LIKE: frozenset[object] = frozenset(("new_empty", "new_zeros", torch.empty_like, torch.zeros_like)) | _CLONES
_WHOLE: frozenset[object] = frozenset((torch.empty_like, torch.zeros_like))
_NARROWS: frozenset[object] = frozenset(("narrow", torch.narrow))
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

    as_written = False  # clones are made, so that the gradients of their sources are added up in the forward's order

    def __init__(self, is_size: Callable[[fx.Proxy, int], bool]) -> None:
        """`is_size` asks whether a traced size is a number, in all calls."""
        self._new: dict[fx.Node, _New] = {}
        self._is_size = is_size
        self._proxies: dict[fx.Node, fx.Proxy] = {}  # of new tensors, as the forward has them
        self._gone: set[fx.Node] = set()  # views that are no operations of the forward any more
        self._written: set[fx.Node] = set()  # what was assigned by a view: `out[:, :k] += a` assigns it again

    def see(self, proxy: fx.Proxy) -> None:
        """Take note of a traced value."""
        if _is_new(proxy.node):
            self._proxies.setdefault(proxy.node, proxy)

    def is_slice(self, node: fx.Node) -> bool:
        """True for a slice of a new tensor that is not filled yet."""
        source = node.args[0] if node.args else None
        index = _index(node) if isinstance(source, fx.Node) and source in self._proxies else None
        return index is not None and _sliced(index) is not None

    def write(self, view: fx.Proxy, value: Any, place: str, cast: bool) -> None:
        """Takes a value that is written into a slice of a new tensor; the other arguments are those of `add`."""
        source = view.node.all_input_nodes[0]
        index = _index(view.node)
        if not view.node.users:  # `out.narrow(1, 0, k).copy_(a)` reads nothing
            view.node.graph.erase_node(view.node)
            self._gone.add(view.node)
        self.add(self._proxies[source], index, value, place, cast)
        if isinstance(value, fx.Proxy):
            self._written.add(value.node)

    def add(self, proxy: fx.Proxy, index: Any, value: Any, place: str, cast: bool) -> None:
        """Takes `proxy[index] = value`, at `place`. Once the tensor is filled, the proxy is the concatenation.

        `cast`: in the dtype of the tensor, whatever that of the parts is. Raises CannotTraceError where the tensor is
        not new, or the assignment is no part of a concatenation.
        """
        if isinstance(value, fx.Proxy) and value.node in self._written:
            return
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
            new.reads[reader] = found
        if part in new.parts:
            raise CannotTraceError(f"{_WHAT}, twice into the same slice {place}")
        new.parts[part] = value
        ordered = self._filling(tuple(new.parts), node, part.dim)
        if ordered and set(new.reads.values()) <= set(ordered):
            parts = [(each, new.parts[each]) for each in ordered]
            added = _added(new, parts)
            source = node if self.as_written and node.target in _CLONES else _like(node)
            if added is not None:
                proxy.node = _sum(parts, added, source, cast).node
                self._erase([*(value.node for _, value in parts), *new.reads])
            else:
                proxy.node = _concatenated(parts, node, cast).node
            if source is not node:
                for reader in node.users.copy():
                    reader.replace_input_with(node, source)
                self._erase([node])
            del self._new[node], self._proxies[node]

    def _erase(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            node.graph.erase_node(node)
            self._gone.add(node)

    def _filling(self, slices: Sequence[_Slice], node: fx.Node, dim: int) -> list[_Slice]:
        """The slices in order, if they fill that dimension of a new tensor; otherwise ()."""
        starts = {each.start: each for each in slices}
        ordered = list(_chained(starts))
        if len(ordered) != len(slices) or len({each.dim for each in slices}) > 1:
            return []
        last = ordered[-1].stop
        whole = last in (None, _size(node, dim))
        if not whole and isinstance(last, int) and last > 0 and node.target in _LIKE:
            source = fx.Proxy(_like(node), self._proxies[node].tracer)
            whole = node.target in _CLONES | _WHOLE and self._is_size(source.size(dim), last)
        return ordered if whole else []

    def check(self, graph: fx.Graph) -> None:
        """Raises CannotTraceError for the first tensor that was not filled, or whose slices are read after that."""
        if any(self._gone.intersection(node.all_input_nodes) for node in graph.nodes):
            raise CannotTraceError(f"{_WHAT}, of which a slice is read after it was written")
        for new in self._new.values():
            raise CannotTraceError(f"{_WHAT}, whose slices need not fill it {new.place}")


def _is_new(node: fx.Node) -> bool:
    made = node.op in ("call_function", "call_method") and node.target in _LIKE | _SIZED
    plain = set(node.kwargs) <= ({"memory_format"} if node.target in _CLONES else {"dtype", "device"})
    like = node.target not in _LIKE or (bool(node.args) and isinstance(node.args[0], fx.Node))
    return made and plain and like and isinstance(node.kwargs.get("device"), fx.Node | None)


def _like(node: fx.Node) -> fx.Node:
    """The tensor that a new one is made like."""
    (source, *_) = node.all_input_nodes
    return source


def _read(reader: fx.Node, node: fx.Node) -> _Slice | None:
    """The slice of a clone that an operation reads; None for another operation."""
    index = _index(reader) if node.target in _CLONES else None
    return None if index is None else _sliced(index)


def _index(reader: fx.Node) -> Any:
    """The index that a view takes: that of `x[...]`, or of `x.narrow(dim, start, length)`; None for other views."""
    if reader.target is operator.getitem:
        return reader.args[1]
    if reader.target not in _NARROWS:
        return None
    given = dict(zip(("input", "dim", "start", "length"), reader.args, strict=False)) | dict(reader.kwargs)
    dim, start, length = (given.get(name) for name in ("dim", "start", "length"))
    if not isinstance(dim, int) or not isinstance(start, int) or (start and not isinstance(length, int)):
        return None
    part = slice(start, start + length if isinstance(length, int) else length)
    return (*(slice(None),) * dim, part) if dim >= 0 else (..., part, *(slice(None),) * (-1 - dim))


def _added(new: _New, parts: Sequence[tuple[_Slice, fx.Proxy]]) -> list[fx.Node] | None:
    """What is added to each slice of a clone, where all that is assigned is such a sum, read by nothing else."""
    readers = {node: part for node, part in new.reads.items() if len(node.users) == 1}
    found = []
    for part, value in parts:
        node = value.node
        own, other = node.args if node.target is operator.add and not node.users else (None, None)
        if not isinstance(own, fx.Node) or not isinstance(other, fx.Node) or readers.get(own) != part:
            return None
        if part.single or len(new.reads) != len(parts):
            return None
        found.append(other)
    return found


def _sum(parts: Sequence[tuple[_Slice, fx.Proxy]], added: Sequence[fx.Node], node: fx.Node, cast: bool) -> fx.Proxy:
    """The sum of a tensor and the concatenation of what is added to its slices."""
    tracer = parts[0][1].tracer
    terms = [fx.Proxy(each, tracer) for each in added]
    whole = tracer.create_proxy("call_function", torch.cat, (terms, parts[0][0].dim), {})
    total = tracer.create_proxy("call_function", operator.add, (fx.Proxy(node, tracer), whole), {})
    return tracer.create_proxy("call_method", "type_as", (total, fx.Proxy(node, tracer)), {}) if cast else total


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
