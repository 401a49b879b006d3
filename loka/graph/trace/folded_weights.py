"""Parameters of three dimensions or more that one product multiplies by as one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loka.sites.products.einsum import matrix_letters


@dataclass(frozen=True, slots=True)
class FoldedViews:
    """What makes a linear of an einsum: text after x, after the weight for (N, K), and after the product."""

    x: str
    weight: str
    out: str


def folded_views(x: str, weight: str, out: str, shape: Sequence[int]) -> FoldedViews | None:
    """An einsum "x,weight->out" by a weight of this shape as a linear; None where the weight is no single matrix.

    The weight is a view where its rows stand together, and its columns; else a copy.

    >>> folded_views("bfd", "fdr", "br", (4, 8, 2))
    FoldedViews(x='.flatten(-2)', weight='.flatten(0, 1).t()', out='')
    >>> folded_views("bd", "edr", "ber", (3, 8, 2))
    FoldedViews(x='', weight='.permute(0, 2, 1).flatten(0, 1)', out='.unflatten(-1, (3, 2))')
    """
    letters = matrix_letters(x, weight, out, shape)
    if letters is None or not (x + out).isalpha():
        return None
    single = "".join(f".squeeze({place})" for place in reversed(range(len(weight))) if weight[place] in letters.single)
    held = "".join(c for c in weight if c not in letters.single)
    rows, columns, sizes = letters.free, letters.contracted, dict(zip(weight, shape, strict=True))
    rest = "".join(c for c in x if c not in columns)
    flipped = held == columns + rows
    first, second = (columns, rows) if flipped else (rows, columns)
    moved = _permute(held, first + second)
    matrix = single + moved + _flatten(len(first), len(second)) + (".t()" if flipped else "")
    made = f".unflatten(-1, ({', '.join(str(sizes[c]) for c in rows)}))" if len(rows) > 1 else ""
    folded = f".flatten(-{len(columns)})" if len(columns) > 1 else ""
    return FoldedViews(_permute(x, rest + columns) + folded, matrix, made + _permute(rest + rows, out))


def _permute(letters: str, order: str) -> str:
    return "" if letters == order else f".permute({', '.join(str(letters.index(c)) for c in order)})"


def _flatten(first: int, second: int) -> str:
    """A view of a tensor of so many and so many dimensions as a matrix."""
    last = f".flatten({first})" if second > 1 else ""
    return last + (f".flatten(0, {first - 1})" if first > 1 else "")
