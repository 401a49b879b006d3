"""Statements that nearly are a join or a mixing layer, each with the one thing that is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain

from loka.graph.expression import Call, Ref, RefKind, text_of
from loka.graph.ir import ForwardIR, NearKind, NearMiss, Shape, Statement
from loka.graph.patterns.linear_chain import readers_of
from loka.graph.patterns.norm import TORCH_NORMS, norm_ending_at, over_other_dimensions

_CONCATENATIONS = frozenset(("cat", "concat", "concatenate"))
_SUMS = frozenset(("add", "iadd"))
_VIEWS = frozenset(("transpose", "permute", "mT", "T", "reshape", "view", "contiguous", "type_as", "to", "swapaxes"))
_PARTS = frozenset(("getitem", "split", "chunk", "narrow", "split_with_sizes", "tensor_split"))
_FLATTENED = frozenset(("flatten", "view", "reshape"))
_PRODUCTS = frozenset(("matmul", "bmm", "einsum"))


def find_near_misses(forward: ForwardIR, shapes: Mapping[str, Shape]) -> tuple[NearMiss, ...]:
    """What nearly matches, outside of the patterns that were found in the forward, in order of the statements."""
    found = {place for mix in forward.mixes for place in mix.places}
    found |= {place for join in forward.joins for place in join.places}
    near = _Near(forward, shapes)
    steps = (near.missing(place) for place in range(len(forward.statements)) if place not in found)
    return tuple(step for step in steps if step is not None)


class _Near:
    """Looks at one statement at a time, as the last of a pattern."""

    def __init__(self, forward: ForwardIR, shapes: Mapping[str, Shape]) -> None:
        self.statements, self.shapes = forward.statements, shapes
        self._readers = readers_of(forward)
        self._places = {step.target: place for place, step in enumerate(forward.statements)}

    def missing(self, place: int) -> NearMiss | None:
        """What a pattern that ends with this statement lacks; None where no pattern is near."""
        mixes = (NearMiss(place, text, NearKind.MIXING) for text in self._mix(place))
        return next(chain(self._norm(place), self._join(place), mixes), None)

    def _norm(self, place: int) -> Iterator[NearMiss]:
        """A norm, or statistics of one, over other dimensions than the last, after a GEMM."""
        step = self.statements[place]
        before = self._set_by(step.operands[0]) if step.operands else None
        rows = before if before is not None and before.op in _FLATTENED else None
        if rows is not None:
            before = self._set_by(rows.operands[0])
        if before is None or before.call is None or step.call is not None:
            return
        over = self._over_flattened(step, before, rows) if rows is not None else self._over_others(step, before)
        if over is not None:
            words = f"{step.op} after it is over {over}, and kernels normalise over the last dimension alone"
            yield NearMiss(self._places[before.target], words, NearKind.NORM)

    def _over_others(self, step: Statement, before: Statement) -> str | None:
        return over_other_dimensions(step, len(self.shapes.get(before.target, ())))

    def _over_flattened(self, step: Statement, before: Statement, rows: Statement) -> str | None:
        """The dimensions of a GEMM's result that a norm of its flattened rows is over, in words; None for others."""
        shape, width = self.shapes.get(before.target, ()), self.shapes.get(rows.target, (None,))[-1]
        if step.op not in TORCH_NORMS or shape[-1:] == (width,):
            return None
        for count in range(2, len(shape)):
            sizes = [size for size in shape[-count:] if size is not None]
            if len(sizes) == count and math.prod(sizes) == width:
                return f"the last {count} dimensions"
        return None

    def _join(self, place: int) -> Iterator[NearMiss]:
        """What the norm of a join lacks, at the statement before it: the norm may be a child's."""
        run = norm_ending_at(self.statements, place)
        before = self._set_by(self.statements[run.first].operands[0]) if run is not None else None
        if before is None or before.op not in _CONCATENATIONS | _SUMS:
            return
        yield NearMiss(self._places[before.target], self._missing_in_join(before))

    def _missing_in_join(self, before: Statement) -> str:
        what = "concatenation" if before.op in _CONCATENATIONS else "sum"
        shape = self.shapes.get(before.target, ())
        dim = _dimension(before)
        if len(shape) != 3:
            return f"the {what} before its norm has {len(shape)} dimensions, not 3 (samples, rows, columns)"
        if dim not in (None, "1", "-2"):
            return f"it concatenates along dimension {dim} before its norm, and rows (dimension 1) are what is joined"
        if self._is_read_twice(before):
            return f"the {what} before its norm is read by something else as well"
        return f"the {what} before its norm is of parts of other shapes than (samples, rows, columns)"

    def _mix(self, place: int) -> Iterator[str]:
        step = self.statements[place]
        if step.op not in _PRODUCTS and step.call is None:
            return
        sources = [self._source(ref) for ref in step.operands]
        kinds = [ref.kind for ref in _factors(step)]
        if step.op == "einsum" and len(kinds) == 3 and {RefKind.LOCAL, RefKind.ATTRIBUTE} == set(kinds):
            yield "an einsum multiplies all three operands of its mixing layer: write two products, x @ (x^T @ rank)"
        elif step.call is not None:
            inner = next((each for ref in step.operands if (each := self._behind_views(ref)) is not None), None)
            if inner is not None and self._is_square(inner):
                yield "its mixing layer is written (x @ x^T) @ rank: write x @ (x^T @ rank), which kernels take"
        for ref, source in zip(step.operands, sources, strict=True) if step.call is None else ():
            inner = self._behind_views(ref)
            others = {other for other in sources if other != source}
            through = self._behind_views(ref, _VIEWS | _PARTS)
            if inner is not None and inner.op == "module" and {self._source(each) for each in inner.operands} & others:
                yield f"x^T @ rank of its mixing layer is made by a module that stays a call, {text_of(inner.value)}"
            of_more = inner is not None and inner.op in _PARTS and through is not None and through.call is not None
            if of_more and through is not None and {self._source(each) for each in through.operands} & others:
                yield "x^T @ rank of its mixing layer is a part of a larger product: multiply by rank alone"
            if inner is None or inner.call is None or not {self._source(each) for each in inner.operands} & others:
                continue
            if self._is_read_twice(inner):
                yield "x^T @ rank of its mixing layer is read by something else as well"
            else:
                yield "its product x @ (x^T @ rank) is of tensors of other shapes than (samples, embeddings, dimension)"

    def _is_square(self, step: Statement) -> bool:
        """True for a product of a tensor of three dimensions and a view of it."""
        pair = {self._source(ref) for ref in step.operands}
        shapes = {len(self.shapes.get(ref.text, ())) for ref in step.operands}
        of_two = step.op in _PRODUCTS and step.call is None and len(_factors(step)) == 2
        return of_two and (len(pair), shapes) == (1, {3})

    def _set_by(self, ref: Ref) -> Statement | None:
        place = self._places.get(ref.text) if ref.kind is RefKind.LOCAL else None
        return None if place is None else self.statements[place]

    def _behind_views(self, ref: Ref, views: frozenset[str] = _VIEWS) -> Statement | None:
        step = self._set_by(ref)
        while step is not None and step.op in views and step.operands:
            step = self._set_by(step.operands[0])
        return step

    def _source(self, ref: Ref) -> str:
        """The local that a local is a view of."""
        step = self._set_by(ref)
        while step is not None and step.op in _VIEWS and step.operands:
            ref = step.operands[0]
            step = self._set_by(ref)
        return ref.text

    def _is_read_twice(self, step: Statement) -> bool:
        return len(self._readers.get(step.target, set())) > 1


def _factors(step: Statement) -> list[Ref]:
    """The operands of a product, in order; one that is multiplied by itself is there twice."""
    return [each for each in step.value.args if isinstance(each, Ref)] if isinstance(step.value, Call) else []


def _dimension(step: Statement) -> str | None:
    """The dimension of a concatenation as it is written; "0" where it is not; None for other operations."""
    value = step.value
    if not isinstance(value, Call) or step.op not in _CONCATENATIONS:
        return None
    named = dict(value.kwargs)
    given = value.args[1] if len(value.args) > 1 else named.get("dim", named.get("axis"))
    return "0" if given is None else text_of(given)
