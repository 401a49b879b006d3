"""Weights by name: a Parameter ("mlp.0.weight"), or a matrix in one ("cross.kernels.2.0", "cross.down.0:32").

`self.kernels[2][0]` is called "kernels.2.0", as if `kernels` were a list: a Parameter has no children, so that no other
name can be meant. `self.down[0:32]` is "down.0:32", and `self.up[:, 32:64]` is "up.:.32:64".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, zip_longest
from math import prod
from typing import Any

from torch import Tensor, nn

_PART = re.compile(r"[0-9]+|[0-9]+:[0-9]+|:")  # of a name: an index, a slice
PIECES = frozenset(("chunk", "split", "split_with_sizes", "tensor_split", "unbind"))
_ARGUMENTS = {"select": ("dim", "index"), "narrow": ("dim", "start", "length")}


@dataclass(frozen=True, slots=True)
class Span:
    """A slice of a dimension, `start:stop`; all of it without both."""

    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        return ":" if self.start is None else f"{self.start}:{self.stop}"


Index = tuple[int | Span, ...]  # of the leading dimensions of a Parameter


def shape_at(shape: Sequence[Any], index: Index) -> tuple[Any, ...]:
    """The shape of the part of a tensor at an index."""
    sizes = []
    for size, place in zip_longest(shape, index, fillvalue=Span()):
        if isinstance(place, Span):
            sizes.append(size if place.start is None or place.stop is None else place.stop - place.start)
    return tuple(sizes)


def part_at(tensor: Tensor, index: Index) -> Tensor:
    """The part of a tensor at an index, a view; the tensor itself at ()."""
    return tensor[tuple(slice(p.start, p.stop) if isinstance(p, Span) else p for p in index)] if index else tensor


@dataclass(frozen=True, slots=True)
class SiteWeight:
    """A Parameter, and the index of the matrix that is taken from it: () for all of it."""

    parameter: nn.Parameter
    index: Index = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape without the indexed dimensions, and without that of a convolution of size 1, (out, in, 1)."""
        shape = shape_at(self.parameter.shape, self.index)
        return shape[:2] if len(shape) == 3 and shape[2] == 1 else shape

    @property
    def value(self) -> Tensor:
        """The Parameter itself, or a view of it."""
        value = part_at(self.parameter, self.index)
        return value if tuple(value.shape) == self.shape else value.view(self.shape)

    def matrix(self, n: int, k: int) -> Tensor | None:
        """A weight of more than two dimensions as the matrix (n, k), a view or a copy; None where it is no such matrix.

        The rows are leading dimensions where there is a choice.
        """
        sizes, places = self.shape, range(len(self.shape))
        for count in range(1, len(sizes)):
            for rows in combinations(places, count):
                columns = [place for place in places if place not in rows]
                if (prod(sizes[place] for place in rows), prod(sizes[place] for place in columns)) == (n, k):
                    return self.value.permute(*rows, *columns).reshape(n, k)
        return None


def find_weight(root: nn.Module, name: str) -> SiteWeight | None:
    """The weight of a name relative to `root`; None where there is none."""
    value: object = root
    parts = name.split(".")
    for place, part in enumerate(parts):
        value = getattr(value, part, None)
        if isinstance(value, nn.Parameter):
            index = in_range(parts[place + 1 :], value.shape)
            return None if index is None else SiteWeight(value, index)
    return None


def in_range(parts: Sequence[str], shape: Sequence[int]) -> Index | None:
    """Parts of a name as the index of a tensor; None where they are none."""
    found = [_PART.fullmatch(part) for part in parts]
    if len(parts) > len(shape) or None in found:
        return None
    index: list[int | Span] = []
    for size, part in zip(shape, parts, strict=False):
        start, colon, stop = part.partition(":")
        if not colon:
            index.append(int(start))
        else:
            index.append(Span(int(start), int(stop)) if start else Span())
        if int(start or 0) >= size or int(stop or 0) > size or (stop and int(start) >= int(stop)):
            return None
    return tuple(index)


def matrix_name(parameter: str, index: Index) -> str:
    """The name of a matrix in a Parameter."""
    return ".".join((parameter, *map(str, index)))


def taken_index(
    op: str, args: Sequence[Any], kwargs: Mapping[str, Any], shape: Sequence[Any], before: Index = ()
) -> Index | None:
    """The index of what `W[2]`, `W[:, 0:32]`, `W.select(0, 2)` or `W.narrow(0, 0, 32)` take from a tensor of a shape.

    `op` is "getitem", "select" or "narrow", `args` are those after the tensor, which is the part of another at
    `before`. None for other operations, and where nothing is taken.
    """
    sizes, given = shape_at(shape, before), dict(zip(_ARGUMENTS.get(op, ()), args, strict=False)) | dict(kwargs)
    items: list[Any] = []
    if op == "getitem" and len(args) == 1 and not kwargs:
        items = list(args[0]) if isinstance(args[0], tuple) else [args[0]]
        dots = [place for place, item in enumerate(items) if item is Ellipsis]
        if len(dots) == 1:
            items[dots[0] : dots[0] + 1] = [slice(None)] * (len(sizes) - len(items) + 1)
    elif op in _ARGUMENTS and all(type(value) is int for value in given.values()) and len(given) == len(_ARGUMENTS[op]):
        dim, first = given["dim"], given.get("start", given.get("index"))
        if not -len(sizes) <= dim < len(sizes) or first is None:
            return None
        taken = slice(first, first + given["length"]) if op == "narrow" else first
        items = [*[slice(None)] * (dim % len(sizes)), taken]
    places = [_place(item, size) for item, size in zip(items, sizes, strict=False)]
    if not items or len(items) > len(sizes):
        return None
    return _inside(before, places, shape)


def pieces_of(
    op: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    pieces: Sequence[Tensor],
    shape: Sequence[Any],
    before: Index,
) -> list[Index | None]:
    """The index of each of the pieces that `op`, one of PIECES, makes of the part of a tensor at `before`.

    `args` are those after the tensor, which has this shape as a whole.
    """
    sizes, after = shape_at(shape, before), 0 if op == "unbind" else 1
    dim = kwargs.get("dim", args[after] if len(args) > after else 0)
    if type(dim) is not int or not -len(sizes) <= dim < len(sizes) or type(sizes[dim]) is not int:
        return [None] * len(pieces)
    if op == "unbind":
        taken: list[int | slice] = list(range(len(pieces)))
    else:
        ends = list(accumulate(piece.shape[dim] for piece in pieces))
        taken = [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]
    lead = [Span()] * (dim % len(sizes))
    return [_inside(before, [*lead, _place(item, sizes[dim])], shape) for item in taken]


def _place(item: Any, size: Any) -> int | Span | None:
    """An item of an index, from 0; None for one that is no number or slice of a dimension of this size."""
    if type(size) is not int:
        return Span() if isinstance(item, slice) and item == slice(None) else None
    if type(item) is int and -size <= item < size:
        return item % size
    if not isinstance(item, slice) or not all(each is None or type(each) is int for each in (item.start, item.stop)):
        return None
    start, stop, step = item.indices(size) if item.step in (None, 1) else (0, 0, 1)
    if step != 1 or start >= stop:
        return None
    return Span() if (start, stop) == (0, size) else Span(start, stop)


def _inside(before: Index, places: Sequence[int | Span | None], shape: Sequence[Any]) -> Index | None:
    """An index of the part of a tensor at another, as one of the tensor; None where a place is."""
    index: list[int | Span] = []
    left = [place for place in places if place is not None]
    for place, _ in zip_longest(before, shape, fillvalue=Span()):
        if not isinstance(place, Span):
            index.append(place)
            continue
        inner, first = left.pop(0) if left else Span(), place.start or 0
        if isinstance(inner, int):
            index.append(first + inner)
        elif inner.start is None or inner.stop is None:
            index.append(place)
        else:
            index.append(Span(first + inner.start, first + inner.stop))
    while index and index[-1] == Span():
        index.pop()
    return None if None in places else tuple(index)


def copies_matrix(op: str, args: Sequence[Any], shape: Sequence[Any]) -> bool:
    """True for a view of a matrix as one of each sample: `W.unsqueeze(0)`, `W[None]`, `W.expand(batch, -1, -1)`.

    `op` is the function's own name, `args` are those after the tensor, which has the `shape` of a matrix, or three
    dimensions if it is such a view already. `repeat` counts too, as it makes the same values.
    """
    given = tuple(args[0]) if len(args) == 1 and isinstance(args[0], tuple | list) else tuple(args)
    if op == "unsqueeze":
        return len(shape) == 2 and given in ((0,), (-3,))
    if op == "getitem":
        return len(shape) == 2 and given in ((None,), (None, ...), (None, slice(None), slice(None)))
    if op not in ("expand", "repeat") or len(given) != 3:
        return False
    kept = [{-1, size} if op == "expand" else {1} for size in shape[-2:]]
    return all(type(size) is int and size in same for size, same in zip(given[1:], kept, strict=True))


def swaps_columns(op: str, args: Sequence[Any]) -> bool:
    """True for a transpose of each matrix in a tensor of three dimensions; `args` are those after the tensor."""
    given = tuple(args[0]) if len(args) == 1 and isinstance(args[0], tuple | list) else tuple(args)
    if op in ("transpose", "swapaxes"):
        return given in ((1, 2), (2, 1), (-1, -2), (-2, -1))
    return (op == "mT" and not given) or (op == "permute" and given in ((0, 2, 1), (0, -1, -2)))
