"""Sizes of products, which may depend on the batch, and their values in each of several runs."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from loka.graph.sites.site import RowCount

Size = int | torch.SymInt
Sizes = tuple[int, ...]  # one size, in each run
Symbols = Mapping[Any, Sizes]  # what the symbols of a graph's sizes are


class UnknownSizeError(ValueError):
    """A size comes from values, which are not known."""


def sizes_at(size: Size, symbols: Symbols, runs: int) -> Sizes:
    """A size in each run. Installs no guards. Raises UnknownSizeError."""
    if isinstance(size, int):
        return (size,) * runs
    expression = size.node.expr
    if expression in symbols:
        return symbols[expression]
    used = expression.free_symbols
    if not used <= symbols.keys():
        raise UnknownSizeError(f"the size {expression} comes from values")
    return tuple(int(expression.subs({each: symbols[each][run] for each in used})) for run in range(runs))


def line_through(points: Sequence[tuple[int, int]]) -> RowCount | None:
    """The line through all points (batch, size), two or more; None where there is none with an integer slope."""
    (batch, size), (other, size_there), *_ = points
    slope, rest = divmod(size_there - size, other - batch)
    line = RowCount(slope, size - slope * batch)
    return None if rest or any(line.at(each) != there for each, there in points) else line


def size_of(shape: Any) -> Size:
    """The product of some dimensions."""
    dimensions: list[Size] = list(shape)
    return reduce(operator.mul, dimensions) if dimensions else 1


def is_one(size: Size) -> bool:
    """True for a size of one. Symbolic sizes are never one here, so that no guard is installed."""
    return isinstance(size, int) and size == 1
