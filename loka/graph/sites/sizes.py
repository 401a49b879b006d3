"""Sizes that may depend on the batch, and the rows of a product as a function of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from loka.graph.sites.site import RowCount

Size = int | torch.SymInt
Symbols = Mapping[Any, RowCount]  # the symbols of a graph's sizes, as functions of the batch


def value_at(size: Size, batch: int, symbols: Symbols) -> int:
    """The size at a batch size. Installs no guards."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs({each: symbols[each].at(batch) for each in expression.free_symbols}))


def line_through(points: Sequence[tuple[int, int]]) -> RowCount | None:
    """The line through all points (batch, size), two or more; None where there is none with an integer slope."""
    (batch, size), (other, size_there), *_ = points
    slope, rest = divmod(size_there - size, other - batch)
    line = RowCount(slope, size - slope * batch)
    return None if rest or any(line.at(each) != there for each, there in points) else line


def size_of(shape: Any) -> Size:
    """The product of some dimensions."""
    total: Size = 1
    for dimension in shape:
        total = total * dimension
    return total


def is_one(size: Size) -> bool:
    """True for a size of one. Symbolic sizes are never one here, so that no guard is installed."""
    return isinstance(size, int) and size == 1
