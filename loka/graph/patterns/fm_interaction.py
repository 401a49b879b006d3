"""FM interactions: the small products that combine a sample's embeddings, which one kernel can compute.

inner = x.transpose(1, 2) @ rank        # x (B, n, d), rank (n, r)
products = x @ inner                    # (B, n, r): all pairs, at low rank
compressed = compress @ x               # (B, c, d), weighted sums; optional

They are found in canonical form (`loka.graph.canonical.contractions`), however the products and transposes are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from loka.graph.canonical.contractions import Contraction, Node, Source, Value, canonical_values, only_moves_axes
from loka.graph.expression import PRODUCT, Arg, RefKind, method, writes
from loka.graph.ir import WEIGHTED, FmInteraction, ForwardIR, Shape, Statement
from loka.graph.patterns.linear_chain import readers_of

_PAIRS, _SUMS = (0, 1, 2), (0, 2, 1)  # axes of the products and of the weighted sums as the kernel writes them


def find_fm_interactions(forward: ForwardIR, shapes: Mapping[str, Shape]) -> tuple[FmInteraction, ...]:
    """The FM interactions of a forward, each as long as possible; `shapes` are those of the targets and arguments.

    Both matrices must be Parameters, and products that the kernel keeps to itself must have no other readers. A forward
    that changes a tensor in place has none, as an interaction is computed in the place of its first statement.
    """
    if changes_in_place(forward.statements):
        return ()
    return tuple(_Finder(forward, shapes).found())


def changes_in_place(statements: Sequence[Statement]) -> bool:
    """True if a statement may change a tensor that another one reads."""
    return any(_writes(step) or (step.target == "_" and not only_moves_axes(step)) for step in statements)


def in_place_reason(statements: Sequence[Statement]) -> str | None:
    """The first statement that may change a tensor in place, and what to do about it; None where there is none.

    It is quoted as it was traced.
    """
    odd = next((step for step in statements if changes_in_place([step])), None)
    if odd is None:
        return None
    if _writes(odd):
        traced = (each for step in statements for each in (step.written or (step,)))
        odd = next((each for each in traced if _writes(each)), odd)
        return f"its forward changes a tensor in place: {odd.text()}; compute it out of place"
    return f"its forward may change a tensor in place where nothing reads the result: {odd.text()}; leave that out"


def _writes(step: Statement) -> bool:
    return step.op.endswith("_") or writes(step.value)


def without_sums(mix: FmInteraction, forward: ForwardIR) -> FmInteraction:
    """The interaction with its products alone: the weighted sums stay the forward's own statements."""
    readers, inside = readers_of(forward), {mix.outer}
    for place in sorted(mix.skipped, reverse=True):
        if readers[forward.statements[place].target] <= inside:
            inside.add(place)
    reads = [place for place in inside if mix.x in (ref.text for ref in forward.statements[place].operands)]
    return replace(
        mix,
        first=min(reads),
        compress=None,
        skipped=tuple(sorted(inside - {mix.outer})),
        gemms=mix.gemms[:1],
        weights=None,
        sizes=(*mix.sizes[:3], 0),
        views=mix.views[:1],
    )


@dataclass(frozen=True, slots=True)
class _Result:
    """A product that is read outside: the statements up to it, and what the kernel's result needs to become it."""

    node: Contraction
    gemm: int  # the statement of the product
    last: int  # the statement that is read: the product or a view of it
    view: Arg  # of `PRODUCT`, the kernel's result: itself, or a transpose of it

    @property
    def within(self) -> tuple[int, ...]:
        """The statements before the one that is read."""
        return () if self.gemm == self.last else (self.gemm,)


class _Finder:
    """Finds FM interactions by the values of a forward's statements."""

    def __init__(self, forward: ForwardIR, shapes: Mapping[str, Shape]) -> None:
        self._statements, self._shapes = forward.statements, shapes
        self._readers = readers_of(forward)
        self._values = canonical_values(forward.statements, shapes, self._readers)
        self._places: dict[Contraction, list[int]] = {}  # of a product, in order: the product itself, then its views
        for place, statement in enumerate(self._statements):
            value = self._values.get(statement.target)
            if value is not None and isinstance(value.node, Contraction):
                self._places.setdefault(value.node, []).append(place)

    def found(self) -> Iterator[FmInteraction]:
        """The interactions, in order of their products; one for each tensor of embeddings."""
        mixed: set[Source] = set()
        for outer in self._places:
            parts = _pairs(outer)
            if parts is None or parts[0] in mixed:
                continue
            x, inner = parts
            mix = self._mix(x, inner, outer)
            if mix is not None:
                mixed.add(x)
                yield mix

    def _mix(self, x: Source, inner: Contraction, outer: Contraction) -> FmInteraction | None:
        embeddings, gemm = self._shapes.get(x.ref.text, ()), self._places[inner][0]
        if len(embeddings) != 3 or embeddings[0] is not None or None in embeddings[1:]:
            return None
        pairs, rank = self._result(outer, _PAIRS), self._size(inner, 2)
        sums = self._weighted_sums(x, inner)
        results = (pairs,) if sums is None else (pairs, sums)
        skipped = self._inside({place for each in results for place in (*each.within, each.last)}, x)
        if rank is None or not self._is_by_weight(gemm) or gemm not in skipped:
            return None
        _, n, d = embeddings
        reads = [place for place in skipped if x.ref in self._statements[place].operands]
        return FmInteraction(
            first=min(reads),
            outer=pairs.last,
            compress=None if sums is None else sums.last,
            skipped=tuple(sorted(skipped - {each.last for each in results})),
            gemms=(gemm,) if sums is None else (gemm, sums.gemm),
            x=x.ref.text,
            rank=_matrix(inner, over_rows=True),
            weights=None if sums is None else _matrix(sums.node, over_rows=False),
            sizes=(n or 0, d or 0, rank, 0 if sums is None else self._size(sums.node, 2) or 0),
            views=tuple(each.view for each in results),
        )

    def _weighted_sums(self, x: Source, inner: Contraction) -> _Result | None:
        """The first product that sums over the embeddings by another matrix, and is no part of a further product."""
        parts = {part for node in self._places for part in (node.left, node.right)}
        for node, places in self._places.items():
            if node == inner or node in parts or node.left != x or not _sums_embeddings(node):
                continue
            if self._is_by_weight(places[0]) and self._size(node, 2) is not None:
                return self._result(node, _SUMS)
        return None

    def _is_by_weight(self, place: int) -> bool:
        """True for a site's GEMM, and for a product with a Parameter that is no GEMM as it is written."""
        step = self._statements[place]
        return step.call is not None or step.op == WEIGHTED

    def _result(self, node: Contraction, axes: tuple[int, ...]) -> _Result:
        """The statement whose value has these axes: the product, or a view that is its only reader."""
        gemm = self._places[node][0]
        value, read = self._value(gemm), self._readers.get(self._statements[gemm].target, set())
        view = min(read) if len(read) == 1 else gemm
        if value.axes != axes and view in self._places[node] and self._value(view).axes == axes:
            return _Result(node, gemm, view, PRODUCT)
        return _Result(node, gemm, gemm, PRODUCT if value.axes == axes else method(PRODUCT, "transpose", 1, 2))

    def _inside(self, results: set[int], x: Source) -> set[int]:
        """The results and the views and products between x and them that nothing else reads."""
        inside = set(results)
        targets = {step.target: place for place, step in enumerate(self._statements) if step.target != x.ref.text}
        grown = True
        while grown:
            names = {
                ref.text for place in inside for ref in self._statements[place].operands if ref.kind is RefKind.LOCAL
            }
            known = {targets[name] for name in names if name in self._values and name in targets}
            more = {place for place in known - inside if self._readers[self._statements[place].target] <= inside}
            grown, inside = bool(more), inside | more
        return inside

    def _value(self, place: int) -> Value:
        return self._values[self._statements[place].target]

    def _size(self, node: Contraction, axis: int) -> int | None:
        """The size of an axis of a product."""
        place = self._places[node][0]
        return self._shapes[self._statements[place].target][self._value(place).axes.index(axis)]


def _sums_embeddings(node: Node) -> bool:
    """True for a product of x (B, n, d) with a matrix, summed over the n."""
    return (
        isinstance(node, Contraction)
        and isinstance(node.left, Source)
        and isinstance(node.right, Source)
        and (node.left.ref.kind, node.right.ref.kind) == (RefKind.LOCAL, RefKind.ATTRIBUTE)
        and node.contracted[0] == 1
        and not node.batch
    )


def _pairs(node: Node) -> tuple[Source, Contraction] | None:
    """x and inner of x @ inner, where inner sums over the same x; None for another product."""
    if (
        not isinstance(node, Contraction)
        or not isinstance(node.left, Source)
        or not isinstance(node.right, Contraction)
    ):
        return None
    along = (node.contracted, node.batch) == ((2, 1), ((0, 0),))
    return (node.left, node.right) if along and _sums_embeddings(node.right) and node.right.left == node.left else None


def _matrix(node: Contraction, over_rows: bool) -> str:
    """The Parameter of a product, transposed where it is summed over its columns and should be over its rows, or so."""
    if not isinstance(node.right, Source):
        raise TypeError("the product has no Parameter")
    name = node.right.ref.text
    return name if (node.contracted[1] == 0) is over_rows else f"{name}.t()"
