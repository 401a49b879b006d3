"""Products in the canonical graph: a sum over what two tensors have in common, however it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from loka.graph.canonical.layout import (
    Dim,
    Piece,
    Size,
    Step,
    joined,
    merged,
    over,
    rows_of,
    steps_along,
    times,
    total,
    translated,
)
from loka.graph.canonical.nodes import Graph, Linear, Node, Operand, Pair, Part, Product, Value, is_weight
from loka.graph.ir import PART, REASSOCIATED


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
    read_once: Callable[[Node], bool]  # True if one statement at most reads a node

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
        found = Value(made, dims, tuple(sizes[label] for label in out))
        return self._reassociated(made, found) or found

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

    def _reassociated(self, made: Linear, found: Value) -> Value | None:
        """(x @ x^T) @ rank as x @ (x^T @ rank), where that is no more work; None for other products."""
        gram = made.x
        if not isinstance(gram, Product) or gram.left is not gram.right or made.site is None:
            return None
        if not self.read_once(gram):
            return None
        if merged(made.k) not in (merged(_own(gram.columns)), merged(_own(gram.rows))):
            return None
        x, over_n = gram.left, tuple(Piece(step.size, step.other) for step in gram.rows)
        n, d, rank = (total((p.size for p in pieces), self.runs) for pieces in (over_n, gram.k[0], made.weight_n))
        if not all(saves_work(*sizes) for sizes in zip(n, d, rank, strict=True)):
            return None
        batch = tuple(Piece(step.size, step.other) for step in gram.batch[0])
        rows = _sorted((*batch, *gram.k[0]))
        of_x = _placed(rows, rank)
        shape = (*(piece.size for piece in merged(rows)), rank)
        inner = self.graph.one(replace(made, shape=shape, x=x, rows=of_x, k=over_n, kind=REASSOCIATED))
        sizes = {"t": total((piece.size for piece in batch), self.runs), "n": n, "d": d, "r": rank}
        of_n, of_d = merged(over_n), merged(gram.k[0])
        left = Value(x, (merged(batch), of_n, of_d), (sizes["t"], n, d))
        shown = (_shown(merged(batch), of_x), _shown(of_d, of_x), (Piece(rank, (1,) * self.runs),))
        right = Value(inner, shown, (sizes["t"], d, rank))
        whole = self._product(
            factor(left, "tnd"), factor(right, "tdr"), "tnr", sizes, ("d",), ("t",), made.place
        )  # fmt: skip
        return Value(whole.node, found.dims, found.shape)  # both have the elements (batch, n, rank) in this order


def columns_of(value: Value, dim: int, start: int, length: int, products: Products) -> Value | None:
    """The columns of a product with a weight as the product with a part of the weight; None for other values."""
    node = value.node
    if not isinstance(node, Linear) or node.bias is not None or len(node.weight_n) != 1 or node.site is None:
        return None
    (n,) = node.weight_n
    runs = products.runs
    if value.dims[dim] != (Piece(n.size, (1,) * runs),) or value.shape[dim] != n.size:
        return None
    whole = Value(
        node.weight, (node.weight_n, merged(node.weight_k)), (n.size, total((p.size for p in node.weight_k), runs))
    )
    flat = part_of(whole, 0, start, length, False, products.graph, node.place)
    size = (length,) * runs
    if len(merged(node.weight_k)) != 1:
        return None
    shape = (*node.shape[:-1], size)
    scale = over(n.size, (1,) * runs)
    rows = tuple(Step(step.size, times(over(step.stride, n.size) or n.size, size), step.other) for step in node.rows)
    if scale is None or any(over(step.stride, n.size) is None for step in node.rows):
        return None
    made = products.graph.one(
        replace(node, shape=shape, rows=rows, weight=flat.node, weight_n=flat.dims[0], weight_k=flat.dims[1], kind=PART)
    )
    dims = tuple(
        (Piece(size, (1,) * runs),)
        if place == dim
        else tuple(Piece(piece.size, times(over(piece.stride, n.size) or n.size, size)) for piece in each)
        for place, each in enumerate(value.dims)
    )
    return Value(made, dims, tuple(size if place == dim else each for place, each in enumerate(value.shape)))


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


def _own(steps: Sequence[Step]) -> tuple[Piece, ...]:
    return tuple(Piece(step.size, step.stride) for step in steps)


def saves_work(embeddings: int | None, dimension: int | None, rank: int | None) -> bool:
    """True if x @ (x^T @ rank) multiplies no more numbers than (x @ x^T) @ rank."""
    if embeddings is None or dimension is None or rank is None:
        return False
    return 2 * dimension * rank <= embeddings * (dimension + rank)
