"""Tensors (1, B, d) as rows: what a forward computes with a first dimension of one, computed of (B, d).

`torch.bmm(x.unsqueeze(0), W).sum(0)` by a Parameter (1, K, N), as in a mixture of one expert, so becomes the linear of
rows that it is, with what is around it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from loka.graph.canonical.columns import Columns, Rows, is_of_elements
from loka.graph.ir import Ref, RefKind, SiteCall, Statement
from loka.graph.trace.observed_shapes import Shape

_LIFTS = frozenset({"unsqueeze", "expand", "view", "reshape", "getitem"})
_TO_ROWS = frozenset({"squeeze", "getitem", "select", "sum", "mean", "flatten", "view", "reshape"})


def rows_of_single(
    statements: Sequence[Statement],
    shapes: Mapping[str, Shape],
    readers: Mapping[str, Collection[int]],
    attributes: Mapping[str, tuple[int, ...]],
) -> Rows:
    """The statements with those of tensors (1, B, d) as statements of rows, if a GEMM is among them.

    The arguments are those of `canonical_runs`. A sum over the first dimension is a view.
    """
    return _Single(statements, shapes, readers, attributes).rows() or Rows(tuple(statements), {}, {})


class _Single(Columns):
    """Converts the statements of one forward that have a first dimension of one."""

    def _of_columns(self) -> set[str]:
        self._lifted = self._lifts()
        found: set[str] = set()
        for step in self._statements:
            shape = self._shapes.get(step.target, ())
            read = {ref.text for ref in step.operands}
            if not _is_single(shape) or step.written:
                continue
            made = self._makes(step, step.call) if step.call is not None else bool(read & found)
            if made and (step.call is not None or self._is_even(step, shape)):
                found.add(step.target)
        return found

    def _lifts(self) -> dict[str, Ref]:
        """The views (1, B, d) of rows, with these rows."""
        found: dict[str, Ref] = {}
        for step in self._statements:
            if step.op not in _LIFTS or step.call is not None or not step.operands or step.written:
                continue
            of, shape = step.operands[0], self._shapes.get(step.target, ())
            if of.kind is RefKind.LOCAL and _is_single(shape):
                rows = found.get(of.text, of)
                if self._shapes.get(rows.text) == self._row_shape(shape):
                    found[step.target] = rows
        return found

    def _makes(self, step: Statement, call: SiteCall) -> bool:
        """True for a GEMM of all rows, with a bias or without."""
        tensors = [ref for ref in step.operands if ref.kind is RefKind.LOCAL]
        plain = len(tensors) == 1 and call.plus is None and call.x == call.out == "{0}"
        return (
            (plain or self._is_added(step, call))
            and call.bias is None
            and _is_single(self._shapes.get(tensors[0].text, ()))
        )

    def _is_added(self, step: Statement, call: SiteCall) -> bool:
        """True for `torch.baddbmm(bias, x, W)` with a Parameter that is added to each row."""
        places = [place for place, ref in enumerate(step.operands) if ref.kind is RefKind.LOCAL]
        if call.plus is None or call.out != "{0}" or len(places) != 1 or call.x != f"{{{places[0]}}}":
            return False
        bias = next((ref for place, ref in enumerate(step.operands) if call.plus == f"{{{place}}}"), None)
        shape = self._shapes.get(step.target, ())
        return bias is not None and bias.kind is RefKind.ATTRIBUTE and self._is_as_high(bias, shape)

    def _is_even(self, step: Statement, shape: Shape) -> bool:
        tensors = [ref for ref in step.operands if ref.kind is RefKind.LOCAL]
        return is_of_elements(step) and bool(tensors) and all(self._is_as_high(ref, shape) for ref in step.operands)

    def _is_as_high(self, ref: Ref, shape: Shape) -> bool:
        if ref.kind is RefKind.LOCAL:
            return self._shapes.get(ref.text) == shape
        sizes = self._attributes.get(ref.text, ())
        return sizes[-1:] == (shape[2],) and set(sizes[:-1]) <= {1}

    def _is_ours(self, step: Statement) -> bool:
        return super()._is_ours(step) or self._is_dropped(step)

    def _is_dropped(self, step: Statement) -> bool:
        """True for a view of rows that converted statements alone read, perhaps through other such views."""
        if step.target not in self._lifted:
            return False
        readers = [self._statements[place : place + 1] for place in self._readers.get(step.target, ())]
        return all(
            reader and (reader[0].target in self._converted or self._is_dropped(reader[0])) for reader in readers
        )

    def _is_row_view(self, step: Statement) -> bool:
        return super()._is_row_view(step) and "dtype" not in step.template

    def _take(self, step: Statement) -> None:
        if not self._is_dropped(step):
            super()._take(step)

    def _linear(self, step: Statement, call: SiteCall) -> Statement:
        (x,) = (ref for ref in step.operands if ref.kind is RefKind.LOCAL)
        places = {f"{{{place}}}": ref for place, ref in enumerate(step.operands)}
        (held,) = (place for place, ref in places.items() if place in call.weight and ref.kind is RefKind.ATTRIBUTE)
        weight = call.weight.replace(held, "{1}")
        operands = [self._row(x), places[held]]
        bias = None if call.plus is None else "{2}"
        if call.plus is not None:
            operands.append(self._row(places[call.plus]))
        text = ", ".join(filter(None, ("{0}", weight, bias)))
        plain = SiteCall(call.site, "{0}", weight, bias, "{0}")
        template = f"torch.nn.functional.linear({text})"
        return Statement(self._name(step.target), "linear", template, tuple(operands), plain, step.note)

    def _row(self, ref: Ref) -> Ref:
        return self._lifted.get(ref.text) or super()._row(ref)

    def _row_text(self, column: Shape) -> str:
        return "{0}.squeeze(0)"

    def _column_text(self, column: Shape) -> str:
        return "{0}.unsqueeze(0)"

    def _views(self, column: Shape) -> frozenset[str]:
        return _TO_ROWS

    def _row_shape(self, column: Shape) -> Shape:
        return column[1:]


def _is_single(shape: Shape) -> bool:
    return len(shape) == 3 and shape[0] == 1 and shape[1] is None and shape[2] is not None
