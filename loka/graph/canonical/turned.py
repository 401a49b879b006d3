"""GEMMs of transposed inputs: `(W @ x.t()).t()`, or a tensordot, as the linear that they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from loka.graph.canonical.contractions import Contraction, Node, Source, Value, canonical_values
from loka.graph.ir import Ref, RefKind, SiteCall, Statement
from loka.graph.patterns.fm_interaction import changes_in_place
from loka.graph.trace.observed_shapes import Shape


def turned_linears(
    statements: Sequence[Statement],
    shapes: Mapping[str, Shape],
    readers: Mapping[str, Collection[int]],
    attributes: Mapping[str, tuple[int, ...]],
) -> tuple[Statement, ...]:
    """The statements with each GEMM between transposes as a linear of what the first of these transposes.

    The linear sums over the last dimension of its input. It stands in the place of the GEMM, for it and for the views
    that it or its reader alone need; nothing may change in place between these. The arguments are those of
    `canonical_runs`.
    """
    finder = _Finder(statements, shapes, readers)
    made: dict[int, Statement] = {}
    gone: set[int] = set()
    for found in finder.found():
        places = [place for place in (found.before, found.gemm, found.after) if place is not None]
        if changes_in_place(statements[min(places) : max(places) + 1]) or gone.intersection(places):
            continue
        made[found.gemm] = found.linear(tuple(statements[place] for place in sorted(places)))
        gone.update(places)
    return tuple(made.get(place, step) for place, step in enumerate(statements) if place in made or place not in gone)


@dataclass(frozen=True, slots=True)
class _Turned:
    """A GEMM, and the views before and after it that nothing else needs."""

    before: int | None
    gemm: int
    after: int | None
    site: str
    x: Ref
    weight: Ref
    flipped: bool  # the Parameter is (K, N)
    bias: Ref | None

    def linear(self, written: tuple[Statement, ...]) -> Statement:
        """The linear, in place of these statements."""
        weight = "{1}.t()" if self.flipped else "{1}"
        bias, added = (None, ()) if self.bias is None else ("{2}", (self.bias,))
        call = SiteCall(self.site, "{0}", weight, bias, "{0}")
        text = f"torch.nn.functional.linear({', '.join(filter(None, ('{0}', weight, bias)))})"
        last = written[-1]
        return Statement(last.target, "linear", text, (self.x, self.weight, *added), call, last.note, written=written)


class _Finder:
    """Finds GEMMs between transposes by the values of a forward's statements."""

    def __init__(
        self, statements: Sequence[Statement], shapes: Mapping[str, Shape], readers: Mapping[str, Collection[int]]
    ) -> None:
        self._statements, self._shapes, self._readers = statements, shapes, readers
        self._values = canonical_values([_without_bias(step) for step in statements], shapes, readers)
        self._places = {step.target: place for place, step in enumerate(statements)}

    def found(self) -> Iterator[_Turned]:
        """Each such GEMM, in order."""
        for gemm, step in enumerate(self._statements):
            value = self._values.get(step.target)
            if step.call is None or step.call.plus is not None or value is None:
                continue
            if (step.call.x, step.call.out) != ("{0}", "{0}") and (turned := self._turned(gemm, value)) is not None:
                yield turned

    def _turned(self, gemm: int, value: Value) -> _Turned | None:
        step, node = self._statements[gemm], value.node
        if step.call is None or not isinstance(node, Contraction) or node.batch or not isinstance(node.right, Source):
            return None
        found = next((each for each in self._inputs(node.left, gemm) if _sums_last(each[1], node.contracted[0])), None)
        if found is None or node.right.ref.kind is not RefKind.ATTRIBUTE:
            return None
        x, _, before = found
        after = None
        if not _is_straight(value):
            after = min(self._readers.get(step.target, ()), default=None)
            if after is None or after >= len(self._statements):  # the forward returns the product
                return None
            view = self._values.get(self._statements[after].target)
            if len(self._readers[step.target]) != 1 or view is None or view.node != node or not _is_straight(view):
                return None
        biases = [ref for place, ref in enumerate(step.operands) if step.call.bias == f"{{{place}}}"]
        if step.call.bias is not None and not biases:
            return None
        bias = biases[0] if biases else None
        return _Turned(before, gemm, after, step.call.site, x, node.right.ref, node.contracted[1] == 0, bias)

    def _inputs(self, node: Node, gemm: int) -> Iterator[tuple[Ref, tuple[int, ...], int | None]]:
        """What a GEMM reads, and what that is a view of: with its axis for each of the node, and the view's place."""
        read = [ref for ref in self._statements[gemm].operands if ref.kind is RefKind.LOCAL]
        if len(read) != 1:
            return
        given, view = read[0], self._view(read[0])
        if (axes := self._axes(node, given)) is not None:
            yield given, axes, None
        if view is None:
            return
        place, of = view
        before = place if set(self._readers[given.text]) == {gemm} else None
        axes = self._values[given.text].axes if node == Source(given) else self._axes(node, of)
        if axes is not None:
            yield of, axes, before

    def _view(self, ref: Ref) -> tuple[int, Ref] | None:
        """The place of the statement of a view, and the local that it is of."""
        place = self._places.get(ref.text)
        step = None if place is None else self._statements[place]
        if place is None or step is None or step.call is not None or len(step.operands) != 1:
            return None
        of = step.operands[0]
        return (place, of) if of.kind is RefKind.LOCAL and ref.text in self._values else None

    def _axes(self, node: Node, ref: Ref) -> tuple[int, ...] | None:
        """The axis of a local for each axis of a node, if the local has the values of the node."""
        value = self._values.get(ref.text)
        if value is not None and value.node == node:
            return tuple(value.axes.index(axis) for axis in range(len(value.axes)))
        dimensions = len(self._shapes.get(ref.text, ()))
        return tuple(range(dimensions)) if node == Source(ref) and dimensions else None


def _without_bias(step: Statement) -> Statement:
    """A GEMM without the bias that is added to its rows: transposes around it are the same."""
    return step if step.call is None else replace(step, call=replace(step.call, bias=None))


def _sums_last(axes: tuple[int, ...], contracted: int) -> bool:
    """True if a product over this axis sums over the last of a tensor whose others stay in order."""
    rest = [axis for place, axis in enumerate(axes) if place != contracted]
    return axes[contracted] == len(axes) - 1 and rest == sorted(rest)


def _is_straight(value: Value) -> bool:
    return value.axes == tuple(range(len(value.axes)))
