"""Sizes that may depend on the batch: an int, or torch's symbolic int in one symbol."""

from __future__ import annotations

from typing import Any

import torch

from loka.sites.site import RowCount

Size = int | torch.SymInt


class NotLinearError(ValueError):
    """A size that is not a linear function of the batch."""


def value_at(size: Size, batch: int) -> int:
    """The size at a batch size. Installs no guards."""
    if isinstance(size, int):
        return size
    expression = _expression(size)
    return int(expression.subs(dict.fromkeys(expression.free_symbols, batch)))


def rows_of(size: Size) -> RowCount:
    """The size as `per_sample * batch + fixed`.

    Raises:
        NotLinearError: it is another function of the batch, such as its square.
    """
    if isinstance(size, int):
        return RowCount(0, size)
    fixed, one, two = (value_at(size, batch) for batch in (1024, 1025, 2048))
    per_sample = one - fixed
    if two - fixed != 1024 * per_sample or len(_expression(size).free_symbols) > 1:
        raise NotLinearError(str(size))
    return RowCount(per_sample, fixed - 1024 * per_sample)


def rows_through(first: tuple[int, int], second: tuple[int, int]) -> RowCount:
    """The line through two points (batch, rows).

    Raises:
        NotLinearError: The slope is not an integer.
    """
    (batch, rows), (other, rows_there) = first, second
    slope, rest = divmod(rows_there - rows, other - batch)
    if rest:
        raise NotLinearError(f"{rows} rows at batch {batch}, {rows_there} at batch {other}")
    return RowCount(slope, rows - slope * batch)


def _expression(size: torch.SymInt) -> Any:
    return size.node.expr
