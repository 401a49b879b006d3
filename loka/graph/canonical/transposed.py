"""Tensors kept as (B, d, n), as (B, n, d): sums and concatenations of which only transposes are read.

`(torch.cat([a, b], 2) + x).transpose(1, 2)` so becomes `torch.cat([a', b'], 1) + x'` of the transposed tensors, and
what else reads x reads a transpose of x'. Mixing layers and joins (`patterns`) are of tensors (B, n, d).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace

from loka.graph.canonical.columns import is_of_elements
from loka.graph.canonical.parts import traced_of
from loka.graph.canonical.views import expression, moved_axes
from loka.graph.ir import ForwardIR, Ref, RefKind, Statement
from loka.graph.patterns.fm_interaction import changes_in_place
from loka.graph.patterns.linear_chain import readers_of
from loka.graph.patterns.norm import arguments
from loka.graph.trace.observed_shapes import Shape

_CONCATENATIONS = frozenset({"cat", "concat", "concatenate"})
_SUMS = frozenset({"add", "iadd"})
_SAME = frozenset({"contiguous"})  # the values of a view, in another layout
_TRANSPOSED = ".transpose(1, 2)"


def rows_of_transposed(forward: ForwardIR, shapes: Mapping[str, Shape]) -> tuple[ForwardIR, Mapping[str, Shape]]:
    """The forward with such sums and concatenations as those of rows, and the shapes of its locals.

    They are one canonical group with what reads their operands. Nothing may change in place in it.
    """
    return _Transposed(forward, shapes).converted() or (forward, shapes)


class _Transposed:
    """Converts the statements of one forward."""

    def __init__(self, forward: ForwardIR, shapes: Mapping[str, Shape]) -> None:
        self._forward, self._statements, self._shapes = forward, forward.statements, shapes
        self._readers = readers_of(forward)
        self._places = {step.target: place for place, step in enumerate(forward.statements)}
        self._sources = self._views()
        self._ours = self._only_transposed()
        self._rows: dict[str, Ref] = {}  # by the tensors that they are the transposes of
        self._new: dict[str, Shape] = {}

    def converted(self) -> tuple[ForwardIR, Mapping[str, Shape]] | None:
        """The forward in rows; None where there are no such sums, or their group has no end of its own."""
        if not any(self._statements[place].op in _CONCATENATIONS | _SUMS for place in self._ours):
            return None
        leaves = self._leaves()
        own = {self._statements[place].target for place in self._ours} | leaves
        views = {place for place, step in enumerate(self._statements) if self._sources.get(step.target) in own}
        read = {place for leaf in leaves for place in self._readers[leaf]} - {len(self._statements)}
        first, last = self._whole_groups(self._ours | views | read)
        group = self._statements[first : last + 1]
        ends = self._ends(own, views)
        if ends is None or changes_in_place(group):
            return None
        made: list[Statement] = []
        for place in range(first, last + 1):
            made += self._made(place, leaves, views, ends)
        made = self._without_unread(made, last)
        if made[-1].target != group[-1].target:
            return None
        made[0] = replace(made[0], written=tuple(traced_of(group)))
        statements = (*self._statements[:first], *made, *self._statements[last + 1 :])
        return replace(self._forward, statements=statements), {**self._shapes, **self._new}

    def _views(self) -> dict[str, str]:
        """The locals that are transposes of a tensor of three dimensions, in whatever layout, with that tensor."""
        found: dict[str, str] = {}
        for step in self._statements:
            if step.call is not None or len(step.operands) != 1 or step.operands[0].kind is not RefKind.LOCAL:
                continue
            of = step.operands[0].text
            node = expression(step)
            moved = None if node is None or len(self._shapes.get(of, ())) != 3 else moved_axes(node, 3)
            if moved is not None and isinstance(moved[0], ast.Name) and moved[1] == (0, 2, 1):
                found[step.target] = of
            elif step.op in _SAME and step.template == "{0}.contiguous()" and of in found:
                found[step.target] = found[of]
        return found

    def _only_transposed(self) -> set[int]:
        """The places of operations on elements, and of concatenations, of which only transposes are read."""
        found: set[int] = set()
        for place in range(len(self._statements) - 1, -1, -1):
            step = self._statements[place]
            readers = self._readers.get(step.target, set())
            inside = all(
                reader in found
                or (
                    reader < len(self._statements) and self._sources.get(self._statements[reader].target) == step.target
                )
                for reader in readers
            )
            if readers and inside and not step.written and self._is_moved_along(step):
                found.add(place)
        return found

    def _is_moved_along(self, step: Statement) -> bool:
        """True for an operation that is the same of transposes."""
        shape = self._shapes.get(step.target, ())
        locals_ = all(ref.kind is RefKind.LOCAL for ref in step.operands)
        if step.call is not None or not _is_block(shape) or not step.operands or not locals_:
            return False
        if step.op in _CONCATENATIONS:
            return self._is_joined(step)
        same = all(self._shapes.get(ref.text) == shape for ref in step.operands)
        return same and is_of_elements(step)

    def _is_joined(self, step: Statement) -> bool:
        """True for a concatenation along the last dimension."""
        call = arguments(step)
        if call is None:
            return False
        given = {**dict(zip(("tensors", "dim"), call[1], strict=False)), **call[2]}
        parts, dim = given.get("tensors"), given.get("dim")
        if set(given) != {"tensors", "dim"} or not isinstance(parts, ast.List | ast.Tuple) or dim is None:
            return False
        names = [part.id for part in parts.elts if isinstance(part, ast.Name)]
        whole = names == [f"operand_{number}" for number in range(len(parts.elts))] and len(names) == len(step.operands)
        return whole and ast.unparse(dim) in ("2", "-1")

    def _leaves(self) -> set[str]:
        """The operands that are no transposes themselves: their transposes are made."""
        targets = {self._statements[place].target for place in self._ours}
        read = {ref.text for place in self._ours for ref in self._statements[place].operands}
        return {name for name in read - targets if name not in self._sources}

    def _whole_groups(self, places: set[int]) -> tuple[int, int]:
        """The first and the last of the places, such that no canonical group is cut."""
        first, last = min(places), max(places)
        spans = [
            (place, self._places[step.written[-1].target])
            for place, step in enumerate(self._statements)
            if step.written
        ]
        for start, end in spans:
            if start < first <= end:
                first = start
            if start <= last < end:
                last = end
        return first, last

    def _ends(self, own: set[str], views: set[int]) -> dict[str, str] | None:
        """The names of rows: of a view, if the tensor has one; None where the forward returns another of its views."""
        named: dict[str, str] = {}
        for place in sorted(views):
            named[self._sources[self._statements[place].target]] = self._statements[place].target
        names = set(named.values())
        returned = (self._statements[place].target for place in views)
        if any(len(self._statements) in self._readers.get(each, ()) and each not in names for each in returned):
            return None
        return {name: named.get(name) or self._fresh(name) for name in own}

    def _fresh(self, name: str) -> str:
        found = f"{name}_rows"
        while found in self._shapes or found in self._new:
            found += "_"
        return found

    def _made(self, place: int, leaves: set[str], views: set[int], names: Mapping[str, str]) -> list[Statement]:
        """What a statement becomes, after the rows that it is the first to read."""
        step, made = self._statements[place], list[Statement]()
        for ref in step.operands:
            if ref.text in leaves and ref.text not in self._rows:
                made.append(Statement(self._row(ref.text, names), "transpose", "{0}" + _TRANSPOSED, (ref,)))
        if place in views:
            return made
        if place not in self._ours:
            return [*made, self._reading_rows(step, leaves)]
        operands = tuple(self._row_of(ref) for ref in step.operands)
        template = step.template
        if step.op in _CONCATENATIONS:
            template = f"torch.cat([{', '.join(f'{{{number}}}' for number in range(len(operands)))}], 1)"
        return [*made, replace(step, target=self._row(step.target, names), template=template, operands=operands)]

    def _row(self, name: str, names: Mapping[str, str]) -> str:
        samples, features, rows = self._shapes[name]
        self._rows[name] = Ref(RefKind.LOCAL, names[name])
        self._new[names[name]] = (samples, rows, features)
        return names[name]

    def _row_of(self, ref: Ref) -> Ref:
        """The transpose of an operand."""
        if ref.text in self._rows:
            return self._rows[ref.text]
        return Ref(RefKind.LOCAL, self._sources[ref.text])

    def _reading_rows(self, step: Statement, leaves: set[str]) -> Statement:
        """The statement with rows for their views, and with transposes of rows for the leaves."""
        turned = [f"{{{number}}}" + _TRANSPOSED * (ref.text in leaves) for number, ref in enumerate(step.operands)]
        operands = tuple(
            self._rows.get(ref.text if ref.text in leaves else self._sources.get(ref.text, ""), ref)
            for ref in step.operands
        )
        call = step.call
        if call is not None:
            plus = None if call.plus is None else call.plus.format(*turned)
            call = replace(call, x=call.x.format(*turned), weight=call.weight.format(*turned), plus=plus)
        return replace(step, template=step.template.format(*turned), operands=operands, call=call, written=())

    def _without_unread(self, made: list[Statement], last: int) -> list[Statement]:
        """The statements without transposes that nothing reads any more."""
        kept: list[Statement] = []
        read: set[str] = set()
        for step in reversed(made):
            outside = any(place > last for place in self._readers.get(step.target, ()))
            if (
                step.target in self._sources
                and step.target not in self._new
                and step.target not in read
                and not outside
            ):
                continue
            read.update(ref.text for ref in step.operands)
            kept.append(step)
        return kept[::-1]


def _is_block(shape: Shape) -> bool:
    return len(shape) == 3 and shape[0] is None and None not in shape[1:]
