"""Weights by name: a Parameter ("mlp.0.weight"), or a matrix in one ("cross.kernels.2.0").

`self.kernels[2][0]` is called "kernels.2.0", as if `kernels` were a list: a Parameter has no children, so that no other
name can be meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

from torch import Tensor, nn

Index = tuple[int, ...]  # of the leading dimensions of a Parameter


@dataclass(frozen=True, slots=True)
class SiteWeight:
    """A Parameter, and the index of the matrix that is taken from it: () for all of it."""

    parameter: nn.Parameter
    index: Index = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape without the indexed dimensions, and without that of a convolution of size 1, (out, in, 1)."""
        shape = tuple(self.parameter.shape[len(self.index) :])
        return shape[:2] if len(shape) == 3 and shape[2] == 1 else shape

    @property
    def value(self) -> Tensor:
        """The Parameter itself, or a view of it."""
        value = self.parameter[self.index] if self.index else self.parameter
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
    if len(parts) > len(shape) or not all(part.isdecimal() for part in parts):
        return None
    index = tuple(map(int, parts))
    return index if all(place < size for place, size in zip(index, shape, strict=False)) else None


def matrix_name(parameter: str, index: Index) -> str:
    """The name of a matrix in a Parameter."""
    return ".".join((parameter, *map(str, index)))


def taken_index(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], shape: Sequence[Any]) -> Index | None:
    """The index of what `W[2]`, `W[2, 0]` or `W.select(0, 2)` take from a tensor of a shape.

    `op` is "getitem" or "select", `args` are those after the tensor. None for other operations, and for indices that
    are no numbers of leading dimensions.
    """
    given = dict(zip(("dim", "index"), args, strict=False)) | dict(kwargs)
    if op == "select" and given.get("dim") in (0, -len(shape)):
        places = [given.get("index")]
    elif op == "getitem" and len(args) == 1 and not kwargs:
        places = list(args[0]) if isinstance(args[0], tuple) else [args[0]]
    else:
        return None
    index = [
        place % size
        for place, size in zip(places, shape, strict=False)
        if type(place) is int and type(size) is int and -size <= place < size
    ]
    return tuple(index) if len(index) == len(places) else None


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
