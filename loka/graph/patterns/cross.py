"""Cross layers of a DCNv2 (arXiv 2008.13535): a GEMM's product times a matrix plus another, in one kernel.

u = linear(x, weight, bias)        # (B, ..., n); the bias may be added by a separate statement
out = x0 * u + x                   # x0 and x of the same shape, x0 the same for all layers; x may be x0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from loka.graph.expression import PRODUCT, Ref, RefKind
from loka.graph.ir import Cross, ForwardIR, Shape, Statement
from loka.graph.patterns.fm_interaction import changes_in_place
from loka.graph.patterns.linear_chain import pair_of, readers_of


def find_crosses(forward: ForwardIR, shapes: Mapping[str, Shape]) -> tuple[Cross, ...]:
    """The cross layers of a forward, in the order of their sums; `shapes` are those of the targets and arguments.

    One factor must be a GEMM's product, with or without a bias, that has no other readers; all tensors must have the
    same shape (B, ..., n), B the batch. A forward that changes a tensor in place has none, as a cross layer is computed
    in the place of its sum.
    """
    return () if changes_in_place(forward.statements) else tuple(_found(forward, shapes))


def _found(forward: ForwardIR, shapes: Mapping[str, Shape]) -> Iterator[Cross]:
    statements, only_for = forward.statements, _Only(forward)
    for end, statement in enumerate(statements):
        shape = shapes.get(statement.target, ())
        width = shape[-1] if len(shape) > 1 else None
        if width is None or shape[0] is not None or statement.call is not None:
            continue
        for multiplied, factors, residual in _written_at(statements, end, only_for):
            found = _cross(statements, (multiplied, end), factors, residual, only_for, width)
            if found is not None and all(shapes.get(name) == shape for name in found.read):
                yield found
                break


class _Only:
    """Finds the statement that sets a local with a single reader."""

    def __init__(self, forward: ForwardIR) -> None:
        self._readers = readers_of(forward)
        self._places = {statement.target: place for place, statement in enumerate(forward.statements)}

    def __call__(self, ref: Ref, reader: int) -> int | None:
        place = self._places.get(ref.text)
        if ref.kind is not RefKind.LOCAL or place is None or place >= reader:
            return None
        return place if self._readers.get(ref.text) == {reader} else None


def _written_at(
    statements: Sequence[Statement], end: int, only_for: _Only
) -> Iterator[tuple[int, tuple[Ref, Ref], Ref]]:
    """The readings of a statement as product + residual: index of the product, its two factors, the residual."""
    pair = pair_of(statements[end], "add")
    for product, residual in () if pair is None else (pair, pair[::-1]):
        place = only_for(product, end)
        factors = None if place is None else pair_of(statements[place], "mul")
        if place is not None and factors is not None:
            yield place, factors, residual


def _cross(
    statements: Sequence[Statement],
    places: tuple[int, int],
    factors: tuple[Ref, Ref],
    residual: Ref,
    only_for: _Only,
    width: int,
) -> Cross | None:
    """The cross layer with these factors, one of which is a GEMM's product; None where neither is."""
    multiplied, end = places
    for product, factor in (factors, factors[::-1]):
        made = only_for(product, multiplied)
        linear = made if made is None or statements[made].call is not None else _biased(statements, made, only_for)
        if made is None or linear is None or {factor.kind, residual.kind} != {RefKind.LOCAL}:
            continue
        call = statements[linear].call
        if call is None or call.out != PRODUCT:
            continue
        bias = _own_bias(statements[linear]) if made == linear else None
        skipped = (multiplied,) if multiplied != end else ()
        return Cross(end, skipped, linear, product.text, bias, factor, residual, width)
    return None


def _biased(statements: Sequence[Statement], place: int, only_for: _Only) -> int | None:
    """Index of the GEMM whose product a statement adds a Parameter to."""
    statement = statements[place]
    pair = pair_of(statement, "add") or ()
    if RefKind.ATTRIBUTE not in [ref.kind for ref in pair]:
        return None
    found = [only_for(ref, place) for ref in pair]
    return next((place for place in found if place is not None), None)


def _own_bias(statement: Statement) -> Ref | None:
    """The GEMM's own bias, where it is an attribute without a change of view."""
    bias = None if statement.call is None else statement.call.bias
    return bias if isinstance(bias, Ref) and bias.kind is RefKind.ATTRIBUTE else None
