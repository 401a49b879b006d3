"""Products in the canonical graph: a sum over what two tensors have in common, however it is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from loka.graph.canonical.layout import (
    Dim,
    Piece,
    Size,
    Step,
    joined,
    merged,
    rows_of,
    steps_along,
    times,
    total,
    translated,
)
from loka.graph.canonical.nodes import Graph, Linear, Operand, Pair, Part, Product, Value, is_weight


class Unsupported(Exception):  # noqa: N818 - control flow within this room
    """An operation that the canonical graph has no form for: its statement is taken as it is."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One operand of a product: its value, and the dimension of it that each label has; none where it is broadcast."""

    value: Value
    labels: Mapping[str, int]

    def pieces(self, label: str) -> tuple[Piece, ...]:
        """The pieces of a label."""
        return self.value.dims[self.labels[label]]


def factor(value: Value, labels: Sequence[str]) -> Factor:
    """A tensor whose dimensions have these labels."""
    return Factor(value, {label: place for place, label in enumerate(labels) if value.dims[place]})


@dataclass(frozen=True, slots=True)
class Products:
    """Makes the products of one forward."""

    graph: Graph
    runs: int

    def contraction(
        self, a: Factor, b: Factor, out: Sequence[str], sizes: Mapping[str, Size], site: str | None, place: int
    ) -> Value:
        """The product of two factors, summed over the labels that are not in `out`; a label of `out` is a dimension."""
        inner = [label for label in sizes if label not in out]
        summed = [label for label in inner if sizes[label] != (1,) * self.runs]
        if not inner or any(label not in a.labels or label not in b.labels for label in summed):
            raise Unsupported
        if is_weight(a.value.node):
            a, b = b, a
        if is_weight(a.value.node):
            raise Unsupported
        together = [label for label in out if label in a.labels and label in b.labels]
        if is_weight(b.value.node):
            if together:
                raise Unsupported  # a matrix for each of a batch
            return self._linear(a, b, out, sizes, summed, site, place)
        return self._product(a, b, out, sizes, summed, together, place)

    def _linear(
        self,
        x: Factor,
        weight: Factor,
        out: Sequence[str],
        sizes: Mapping[str, Size],
        summed: Sequence[str],
        site: str | None,
        place: int,
    ) -> Value:
        found_k = steps_along(
            tuple(x.pieces(label) for label in summed),
            tuple(weight.pieces(label) for label in summed),
            [sizes[label] for label in summed],
        )
        if found_k is None:
            raise Unsupported
        rows = _sorted(piece for label in out if label in x.labels for piece in x.pieces(label))
        columns = [piece for label in out if label in weight.labels for piece in weight.pieces(label)]
        n = total((piece.size for piece in columns), self.runs)
        of_x, of_weight = _placed(rows, n), _placed(columns, (1,) * self.runs)
        k, weight_k = (tuple(Piece(step.size, stride) for step, stride in each) for each in _both(found_k))
        shape = (*(piece.size for piece in merged(rows)), n)
        made = self.graph.one(
            Linear(
                shape=shape, place=place, x=x.value.node, rows=of_x, k=k, weight=weight.value.node,
                weight_n=merged(columns), weight_k=weight_k, site=site,
            )
        )  # fmt: skip
        dims = tuple(
            _shown(x.pieces(label), of_x)
            if label in x.labels
            else _shown(weight.pieces(label), of_weight)
            if label in weight.labels
            else ()
            for label in out
        )
        return Value(made, dims, tuple(sizes[label] for label in out))

    def _product(
        self,
        a: Factor,
        b: Factor,
        out: Sequence[str],
        sizes: Mapping[str, Size],
        summed: Sequence[str],
        together: Sequence[str],
        place: int,
    ) -> Value:
        if b.value.node.place < a.value.node.place:
            a, b = b, a
        batch = steps_along(
            tuple(a.pieces(label) for label in together),
            tuple(b.pieces(label) for label in together),
            [sizes[label] for label in together],
        )
        ks = steps_along(
            tuple(a.pieces(label) for label in summed),
            tuple(b.pieces(label) for label in summed),
            [sizes[label] for label in summed],
        )
        if batch is None or ks is None:
            raise Unsupported
        own = [
            _sorted(
                piece for label in out if label in each.labels and label not in together for piece in each.pieces(label)
            )
            for each in (a, b)
        ]
        counts = [total((piece.size for piece in pieces), self.runs) for pieces in own]
        of_b, of_a = _placed(own[1], (1,) * self.runs), _placed(own[0], counts[1])
        inner = times(counts[0], counts[1])
        of_batch, right = (_placed([Piece(step.size, to) for step, to in each], inner) for each in _both(batch))
        size = total((step.size for step in batch), self.runs)
        left_k, right_k = (tuple(Piece(step.size, stride) for step, stride in each) for each in _both(ks))
        made = Product(
            shape=(size, counts[0], counts[1]),
            place=place,
            left=a.value.node,
            right=b.value.node,
            batch=(of_batch, right),
            rows=of_a,
            columns=of_b,
            k=(left_k, right_k),
        )
        node = self.graph.one(made)
        dims: list[Dim] = []
        for label in out:
            each, steps = (a, of_batch if label in together else of_a) if label in a.labels else (b, of_b)
            dims.append(_shown(each.pieces(label), steps) if label in each.labels else ())
        return Value(node, tuple(dims), tuple(sizes[label] for label in out))


def part_of(value: Value, dim: int, start: int, length: int, selected: bool, graph: Graph, place: int) -> Value:
    """A slice of a tensor; of a slice, as one of what that is of, by the order of its dimensions."""
    runs = len(value.shape[dim])
    if not selected and value.shape[dim] == (length,) * runs:
        return value
    inner = value.node
    if isinstance(inner, Part) and all(_in_order(each) for each in (value, inner.of)):
        if inner.dim == dim and not inner.selected:
            return part_of(inner.of, dim, inner.start + start, length, selected, graph, place)
        outer = dim + (inner.selected and inner.dim <= dim)
        if outer < inner.dim:
            first = part_of(inner.of, outer, start, length, selected, graph, place)
            return part_of(first, inner.dim - selected, inner.start, inner.length, inner.selected, graph, place)
    size = (length,) * runs
    shape = tuple(size if at == dim else each for at, each in enumerate(value.shape) if at != dim or not selected)
    made = Part(shape=shape, place=place, of=value, dim=dim, start=start, length=length, selected=selected)
    node = graph.one(made)
    return Value(node, rows_of(shape), shape)


def _in_order(value: Value) -> bool:
    """True for a tensor whose elements are those of its node in order."""
    return value.shape == value.node.shape and value.dims == rows_of(value.shape)


def multiplied(value: Value) -> tuple[Factor, Factor, dict[str, Size]] | None:
    """The factors of an element-wise product of two tensors, labelled by its dimensions; None for another value."""
    node = value.node
    if not isinstance(node, Pair) or node.op != "mul":
        return None
    labels = [str(place) for place in range(len(value.dims))]
    a, b = (operand_value(operand, value) for operand in node.operands)
    if a is None or b is None:
        return None
    return factor(a, labels), factor(b, labels), dict(zip(labels, value.shape, strict=True))


def operand_value(operand: Operand, value: Value) -> Value | None:
    """An operand as a tensor of the dimensions of a value of its reader."""
    dims = translated(value.dims, operand.steps)
    return None if dims is None else Value(operand.node, dims, value.shape)


def _sorted(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces in the order of their value, the outer one first."""
    return sorted(pieces, key=lambda piece: piece.stride, reverse=True)


def _placed(pieces: Sequence[Piece], inner: Size) -> tuple[Step, ...]:
    """Pieces, the outer one first, as elements in order above an inner size: steps from these to the pieces."""
    steps, stride = list[Step](), inner
    for piece in reversed(pieces):
        steps.insert(0, Step(piece.size, stride, piece.stride))
        stride = times(stride, piece.size)
    return joined(steps)


def _shown(pieces: Sequence[Piece], steps: Sequence[Step]) -> Dim:
    """Pieces of what is read, as those of the reader's elements. Raises Unsupported."""
    found = translated((tuple(pieces),), [Step(step.size, step.other, step.stride) for step in steps])
    if found is None:
        raise Unsupported
    return found[0]


def _both(steps: Sequence[Step]) -> tuple[list[tuple[Step, Size]], list[tuple[Step, Size]]]:
    """Steps with their strides in the first value, and in the other."""
    return [(step, step.stride) for step in steps], [(step, step.other) for step in steps]
