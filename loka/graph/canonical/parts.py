"""Norms and residuals of the parts of a concatenation, as those of the whole.

`torch.cat([norm(a + x[:, :m]), norm(b + x[:, m:])], 1)` so becomes `norm(torch.cat([a, b], 1) + x)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from loka.graph.canonical.evaluation import CASTS, Evaluable, agree, drawn, evaluable, evaluated
from loka.graph.ir import ForwardIR, Ref, RefKind, Statement
from loka.graph.patterns.concat_norm import concatenated
from loka.graph.patterns.fm_interaction import changes_in_place
from loka.graph.patterns.linear_chain import readers_of
from loka.graph.patterns.norm import parse_norm
from loka.graph.trace.observed_shapes import Shape

_BATCH = 3  # drawn for a dimension that differs between calls
_SUM = "{0} + {1}"
_DEEPEST = 5  # statements between a tensor and a part of it


def whole_of_parts(
    forward: ForwardIR, shapes: Mapping[str, Shape], attributes: Mapping[str, tuple[int, ...]]
) -> tuple[ForwardIR, Mapping[str, Shape]]:
    """The forward with what each concatenation's parts have in common done once, and the shapes of its locals.

    The parts are (B, n_i, d), concatenated along the n_i, and nothing else reads them. `shapes` are those of the locals
    of the forward, in which no name is set twice, `attributes` those of Parameters and buffers by their expressions.
    """
    place = 0
    while place < len(forward.statements):
        found = _Parts(forward, shapes, attributes).at(place)
        if found is None:
            place += 1
            continue
        forward, shapes = found.forward, {**shapes, **found.shapes}
        place = found.last + 1
    return forward, shapes


def traced_of(statements: Sequence[Statement]) -> Iterator[Statement]:
    """The statements that these stand for, as they were traced; no canonical group is cut."""
    ends = {step.target: place for place, step in enumerate(statements)}
    place = 0
    while place < len(statements):
        step = statements[place]
        yield from traced_of(step.written) if step.written else (step,)
        place = ends[step.written[-1].target] + 1 if step.written else place + 1


def group_of(run: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """What the first of the statements for a run stands for: with all of a canonical group that the run begins."""
    group = run[0].written
    if not group:
        return run
    return tuple(traced_of(run)) if group[-1].target in {step.target for step in run} else group


@dataclass(frozen=True, slots=True)
class _Whole:
    """A forward with one concatenation changed, the shapes of the new locals, and the group's last place."""

    forward: ForwardIR
    shapes: Mapping[str, Shape]
    last: int


@dataclass(frozen=True, slots=True)
class _Common:
    """What the parts of a concatenation have in common."""

    parts: tuple[Ref, ...]  # without it
    steps: tuple[Statement, ...]  # of the whole, without targets: operand 0 is the concatenation
    removed: frozenset[int]


class _Parts:
    """Looks at the concatenations of one forward."""

    def __init__(
        self, forward: ForwardIR, shapes: Mapping[str, Shape], attributes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._forward, self._statements = forward, forward.statements
        self._shapes, self._attributes = shapes, attributes
        self._readers = readers_of(forward)
        self._places = {step.target: place for place, step in enumerate(forward.statements)}

    def at(self, place: int) -> _Whole | None:
        """The forward with the concatenation at a place changed; None where its parts have nothing in common."""
        joined = concatenated(self._statements[place])
        whole = self._shapes.get(self._statements[place].target, ())
        if len(joined) < 2 or len(whole) != 3 or any(len(self._shapes.get(ref.text, ())) != 3 for ref in joined):
            return None
        common = _Common(joined, (), frozenset())
        for more in (self._norms, self._residuals):
            common = more(common, place, whole) or common
        if not common.steps or changes_in_place(self._statements[min(common.removed) : place + 1]):
            return None
        return self._whole(place, common, whole)

    def _norms(self, common: _Common, reader: int, whole: Shape) -> _Common | None:
        """The parts without a norm that each of them ends with, the same for all."""
        found = [self._alone(ref, reader) for ref in common.parts]
        steps = [self._statements[place] for place in found if place is not None]
        norms = [parse_norm(step) for step in steps]
        if len(steps) < len(common.parts) or norms[0] is None or any(norm != norms[0] for norm in norms):
            return None
        inputs = tuple(step.operands[0] for step in steps)
        if any(
            self._shapes.get(ref.text, ()) != self._shapes[step.target] for ref, step in zip(inputs, steps, strict=True)
        ):
            return None
        removed = common.removed | {place for place in found if place is not None}
        return _Common(inputs, (replace(steps[0], written=()), *common.steps), removed)

    def _residuals(self, common: _Common, reader: int, whole: Shape) -> _Common | None:
        """The parts without the residual of each, where these are the parts of one tensor."""
        removed, others, base, start = set(common.removed), list[Ref](), None, 0
        for ref in common.parts:
            chain, place = self._through_casts(ref, reader, removed)
            step = None if place is None else self._statements[place]
            if step is None or step.template != _SUM or self._shapes.get(step.target) != self._shapes[ref.text]:
                return None
            rows = self._shapes[ref.text][1] or 0
            for part, other in (step.operands, step.operands[::-1]):
                of = self._part_of(part, start, start + rows, whole)
                if of is not None and base in (None, of) and self._shapes.get(other.text) == self._shapes[ref.text]:
                    base = of
                    others.append(other)
                    break
            else:
                return None
            start += rows
            removed.update(chain)
        if base is None or start != whole[1]:
            return None
        total = Statement("", "add", _SUM, (base, base))
        return _Common(tuple(others), (total, *common.steps), frozenset(removed))

    def _through_casts(self, ref: Ref, reader: int, removed: set[int]) -> tuple[list[int], int | None]:
        """The places of the statement that makes a value and of the casts after it; and the first of them."""
        chain: list[int] = []
        readers = {reader, *removed}
        while (place := self._alone(ref, *readers)) is not None:
            chain.append(place)
            step = self._statements[place]
            if step.op not in CASTS or step.call is not None:
                return chain, place
            ref, readers = step.operands[0], {place}
        return chain, None

    def _alone(self, ref: Ref, *readers: int) -> int | None:
        """The place of the statement that makes a local, if these alone read it; casts to its dtype do not count."""
        read = {place for place in self._readers.get(ref.text, ()) if not self._reads_dtype(place, ref)}
        return self._places.get(ref.text) if ref.kind is RefKind.LOCAL and read <= set(readers) else None

    def _reads_dtype(self, place: int, ref: Ref) -> bool:
        """True for a statement that casts another value to the dtype of this one."""
        if place >= len(self._statements):
            return False
        step = self._statements[place]
        return step.op in CASTS and len(step.operands) == 2 and step.operands[0] != ref

    def _part_of(self, ref: Ref, start: int, stop: int, whole: Shape) -> Ref | None:
        """The tensor of the whole's shape of which a local is the rows from start to stop; None where it is no such."""
        base: Ref | None = None
        waiting, needed, values = [ref], dict[int, Evaluable](), dict[Ref, torch.Tensor]()
        while waiting:
            here = waiting.pop()
            if here.kind is RefKind.ATTRIBUTE and here.text in self._attributes:
                values[here] = torch.zeros(self._attributes[here.text])
                continue
            if needed and self._shapes.get(here.text) == whole and base in (None, here):
                base = here
                continue
            place = self._places.get(here.text)
            step = None if place is None else self._statements[place]
            known = None if step is None or step.call is not None else evaluable(step)
            if place is None or step is None or known is None or len(needed) == _DEEPEST:
                return None
            if place not in needed:
                needed[place] = known
                dtypes = step.operands[1:] if step.op in CASTS else ()
                values.update(dict.fromkeys(dtypes, torch.zeros(())))
                waiting += [each for each in step.operands if each not in dtypes]
        if base is None:
            return None
        sizes = tuple(_BATCH if size is None else size for size in whole)
        (values[base],) = drawn([sizes], seed=1)
        found = evaluated([needed[place] for place in sorted(needed)], values)
        return base if isinstance(found, torch.Tensor) and agree(found, values[base][:, start:stop]) else None

    def _whole(self, place: int, common: _Common, whole: Shape) -> _Whole | None:
        joined = self._statements[place]
        removed = {*common.removed, place}
        read = {ref.text for ref in (*common.parts, *(ref for step in common.steps for ref in step.operands))}
        for each in sorted(range(place), reverse=True):  # parts and sizes that only removed statements read
            step = self._statements[each]
            pure = step.call is None and not step.written and step.op != "checked_length"
            known = evaluable(step) if pure else None
            if (
                known is not None
                and step.target not in ("_", *read)
                and self._readers.get(step.target, {-1}) <= removed
            ):
                removed.add(each)
        first = min(removed)
        for start, step in enumerate(self._statements[:place]):  # no other group is cut
            if step.written and start < first <= self._places[step.written[-1].target]:
                first = start
                break
        shapes: dict[str, Shape] = {}
        text = ", ".join(f"{{{number}}}" for number in range(len(common.parts)))
        made = [replace(joined, template=f"torch.cat([{text}], 1)", operands=common.parts, written=())]
        for step in common.steps:
            name = self._fresh(joined.target, shapes)
            shapes[name] = whole
            made[-1] = replace(made[-1], target=name)
            operands = (Ref(RefKind.LOCAL, name), *step.operands[1:])
            made.append(replace(step, target=joined.target, operands=operands, note=joined.note))
        kept = [self._statements[each] for each in range(first, place) if each not in removed]
        group = [replace(step, written=()) for step in kept] + made
        group[0] = replace(group[0], written=tuple(traced_of(self._statements[first : place + 1])))
        statements = (*self._statements[:first], *group, *self._statements[place + 1 :])
        return _Whole(replace(self._forward, statements=statements), shapes, first + len(group) - 1)

    def _fresh(self, name: str, taken: Mapping[str, Shape]) -> str:
        number = 0
        while (found := f"{name}_whole_{number}") in self._shapes or found in taken:
            number += 1
        return found
