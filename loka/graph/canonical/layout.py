"""Layouts: how the dimensions of a tensor lie in the elements of the value that it shows.

A value is a flat row of elements. A dimension of a tensor that shows it is a tuple of pieces, the outer one first: so
many steps of such a stride. Views, transposes and reshapes change the pieces alone, so that two tensors are the same
value in the same layout exactly where their pieces are equal, whichever way they were made.

Sizes and strides are tuples with a number for each run of the forward, as the runs differ in the batch size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Size = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Steps along the elements of a value."""

    size: Size
    stride: Size


Dim = tuple[Piece, ...]  # () for a dimension of one element, or one that is broadcast
Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A piece of one value, and the stride of the same elements in another; a stride of 0 where that is broadcast."""

    size: Size
    stride: Size
    other: Size

    @property
    def end(self) -> Size:
        """The stride of what is next."""
        return times(self.size, self.stride)


def one(size: Size) -> Size:
    """The size 1 for as many runs."""
    return (1,) * len(size)


def times(a: Size, b: Size) -> Size:
    """The product of two sizes."""
    return tuple(x * y for x, y in zip(a, b, strict=True))


def over(a: Size, b: Size) -> Size | None:
    """The quotient of two sizes; None where b does not divide a in each run."""
    if any(y == 0 or x % y for x, y in zip(a, b, strict=True)):
        return None
    return tuple(x // y for x, y in zip(a, b, strict=True))


def total(sizes: Iterable[Size], runs: int) -> Size:
    """The product of sizes."""
    made: Size = (1,) * runs
    for size in sizes:
        made = times(made, size)
    return made


def is_fixed(size: Size) -> bool:
    """True if a size is the same in all runs."""
    return len(set(size)) == 1


def merged(pieces: Iterable[Piece]) -> Dim:
    """The pieces without those of one element, with neighbours that are one piece as such."""
    made: list[Piece] = []
    for piece in pieces:
        if piece.size == one(piece.size):
            continue
        if made and made[-1].stride == times(piece.size, piece.stride):
            made[-1] = Piece(times(made[-1].size, piece.size), piece.stride)
        else:
            made.append(piece)
    return tuple(made)


def rows_of(shape: Sequence[Size]) -> Dims:
    """The dimensions of a tensor whose elements stand in order."""
    made: list[Dim] = []
    stride = (1,) * (len(shape[0]) if shape else 1)
    for size in reversed(shape):
        made.insert(0, merged([Piece(size, stride)]))
        stride = times(stride, size)
    return tuple(made)


def size_of(dim: Dim, runs: int) -> Size:
    """The number of elements of a dimension that is not broadcast."""
    return total((piece.size for piece in dim), runs)


def regrouped(pieces: Sequence[Piece], shape: Sequence[Size]) -> Dims | None:
    """Pieces in order as the dimensions of a view of this shape; None where a dimension would cut a piece unevenly."""
    rest, made = list(pieces), list[Dim]()
    for size in reversed(shape):
        need, taken = size, list[Piece]()
        while need != one(need):
            if not rest:
                return None
            piece = rest.pop()
            whole, part = over(need, piece.size), over(piece.size, need)
            if whole is not None:
                taken.insert(0, piece)
                need = whole
            elif part is not None:
                rest.append(Piece(part, times(piece.stride, need)))
                taken.insert(0, Piece(need, piece.stride))
                need = one(need)
            else:
                return None
        made.insert(0, merged(taken))
    return None if merged(rest) else tuple(made)


def steps_along(dims: Dims, other: Dims, shape: Sequence[Size]) -> tuple[Step, ...] | None:
    """The elements of one tensor's value and, along them, of another's that is broadcast to it.

    `dims` are all of the first value's, of this shape; `other` may have () where it is broadcast, and fewer dimensions.
    The steps are in the order of the first value, the outer one first. None where the pieces cannot be paired.
    """
    made: list[Step] = []
    other = ((),) * (len(dims) - len(other)) + other
    for dim, beside, size in zip(dims, other, shape, strict=True):
        if size_of(dim, len(size)) != size:
            return None
        if not beside:
            made += [Step(piece.size, piece.stride, (0,) * len(size)) for piece in dim]
            continue
        left, right = list(dim), list(beside)
        while left and right:
            a, b = left.pop(), right.pop()
            longer, shorter = over(a.size, b.size), over(b.size, a.size)
            if longer is not None:
                made.append(Step(b.size, a.stride, b.stride))
                left += merged([Piece(longer, times(a.stride, b.size))])
            elif shorter is not None:
                made.append(Step(a.size, a.stride, b.stride))
                right += merged([Piece(shorter, times(b.stride, a.size))])
            else:
                return None
        if left or right:
            return None
    return joined(made)


def joined(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Steps in order, the outer one first, with neighbours that are one as such."""
    made: list[Step] = []
    for step in sorted(steps, key=lambda each: (each.stride, each.size), reverse=True):
        if made and made[-1].stride == step.end and made[-1].other == times(step.size, step.other):
            made[-1] = Step(times(made[-1].size, step.size), step.stride, step.other)
        else:
            made.append(step)
    return tuple(made)


def translated(dims: Dims, steps: Sequence[Step]) -> Dims | None:
    """Dimensions of the first value as those of the other, along these steps.

    () stands where the other is broadcast. None where a dimension is broadcast in part, or cuts a step unevenly.
    """
    made: list[Dim] = []
    for dim in dims:
        found: list[Piece] = []
        broadcast = False
        for piece in reversed(dim):
            at, left = piece.stride, piece.size
            while left != one(left):
                step = next((each for each in steps if _holds(each, at)), None)
                skipped = None if step is None else over(at, step.stride)
                rest = None if step is None or skipped is None else over(step.size, skipped)
                if step is None or skipped is None or rest is None:
                    return None
                size = rest if over(left, rest) is not None else left if over(rest, left) is not None else None
                if size is None:
                    return None
                broadcast |= not any(step.other)
                if any(step.other):
                    found.insert(0, Piece(size, times(step.other, skipped)))
                at, left = times(at, size), over(left, size) or left
        if broadcast and found:
            return None
        made.append(merged(found))
    return tuple(made)


def _holds(step: Step, at: Size) -> bool:
    """True if a stride is one within a step."""
    return all(start <= each < end for start, each, end in zip(step.stride, at, step.end, strict=True))


def is_within(dim: Dim, pieces: Sequence[Piece]) -> bool:
    """True if a dimension steps along these pieces alone."""
    steps = [Step(piece.size, piece.stride, piece.stride) for piece in pieces]
    return all(any(_holds(step, each.stride) and _ends_in(each, step) for step in steps) for each in dim)


def _ends_in(piece: Piece, step: Step) -> bool:
    return all(end <= whole for end, whole in zip(times(piece.size, piece.stride), step.end, strict=True))


@dataclass(frozen=True, slots=True)
class Move:
    """A change of layout: a reshape where `before` is set, a permutation where `order` is, a reshape to the result."""

    before: tuple[Size, ...] | None
    order: tuple[int, ...] | None
    after: tuple[Size, ...] | None


def move(dims: Dims, to: Dims, shape: Sequence[Size], to_shape: Sequence[Size]) -> Move | None:
    """How a tensor with these dimensions, none of them broadcast, becomes one with others; None if it cannot."""
    runs = len((*shape, *to_shape)[0]) if (shape or to_shape) else 1
    # Neighbours that are one piece are so whatever cuts them: blocks of 16 in rows of 3 are a view, too.
    given, wanted = (merged(piece for dim in each for piece in dim) for each in (dims, to))
    atoms = _atoms(given, wanted)
    if atoms is None:
        return None
    first, last = atoms
    if first == last:
        return Move(None, None, None if tuple(shape) == tuple(to_shape) else tuple(to_shape))
    first, last = _coarsened(first, last)
    order = tuple(first.index(piece) for piece in last)
    sizes = tuple(piece.size for piece in first)
    moved = tuple(sizes[place] for place in order)
    squeezed = tuple(size for size in shape if size != (1,) * runs)
    places = [place for place, size in enumerate(shape) if size != (1,) * runs]
    if sizes == squeezed:  # the dimensions as they are: those of one element stay where they are in the order
        ones = [place for place in range(len(shape)) if place not in places]
        full = _with_ones(order, places, ones, len(to_shape))
        if full is not None and tuple(shape[place] for place in full) == tuple(to_shape):
            return Move(None, full, None)
    return Move(None if sizes == tuple(shape) else sizes, order, None if moved == tuple(to_shape) else tuple(to_shape))


def _with_ones(order: Sequence[int], places: Sequence[int], ones: Sequence[int], count: int) -> tuple[int, ...] | None:
    """A permutation of the dimensions of more than one element, with the others left where they stand."""
    if len(places) + len(ones) != count:
        return None
    rest = [places[place] for place in order]
    return tuple(place if place in ones else rest.pop(0) for place in range(count))


def _atoms(given: Sequence[Piece], wanted: Sequence[Piece]) -> tuple[list[Piece], list[Piece]] | None:
    """Both lists of pieces, cut such that they hold the same pieces."""
    ends = {stride for piece in (*given, *wanted) for stride in (piece.stride, times(piece.size, piece.stride))}
    first, last = (_cut(pieces, ends) for pieces in (given, wanted))
    if first is None or last is None or sorted(first, key=repr) != sorted(last, key=repr):
        return None
    return first, last


def _cut(pieces: Sequence[Piece], ends: set[Size]) -> list[Piece] | None:
    made: list[Piece] = []
    for piece in pieces:
        inner = [end for end in ends if _holds(Step(piece.size, piece.stride, piece.stride), end)]
        bounds = [*sorted(inner), times(piece.size, piece.stride)]
        parts = []
        for low, high in pairwise(bounds):
            size = over(high, low)
            if size is None:
                return None
            parts.append(Piece(size, low))
        made += reversed(parts)
    return made


def _coarsened(first: list[Piece], last: list[Piece]) -> tuple[list[Piece], list[Piece]]:
    """The pieces with those that are neighbours in both orders as one."""
    place = 0
    while place + 1 < len(first):
        a, b = first[place], first[place + 1]
        where = last.index(a)
        if last[where + 1 : where + 2] == [b]:
            whole = Piece(times(a.size, b.size), b.stride) if a.stride == times(b.size, b.stride) else None
            if whole is not None:
                first[place : place + 2], last[where : where + 2] = [whole], [whole]
                continue
        place += 1
    return first, last
