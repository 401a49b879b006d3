"""Columns as rows: what a forward computes of tensors (B, d, 1) or (d, B), computed of (B, d).

`W @ x` of columns so becomes the linear of rows that it is, with the sums, products and activations around it.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from loka.graph.canonical.evaluation import ANALYTIC, CASTS
from loka.graph.canonical.parts import traced_of
from loka.graph.canonical.views import expression
from loka.graph.ir import Ref, RefKind, SiteCall, Statement
from loka.graph.patterns.fm_interaction import changes_in_place
from loka.graph.patterns.region import ACTIVATIONS
from loka.graph.trace.observed_shapes import Shape

_REDUCING = frozenset(
    {
        *("mean", "sum", "var", "std", "var_mean", "std_mean", "norm", "vector_norm"),
        *("layer_norm", "rms_norm", "group_norm", "einsum"),
    }
)
_OF_ELEMENTS = (ANALYTIC - _REDUCING) | ACTIVATIONS | CASTS
_NODES = (
    *(ast.Call, ast.keyword, ast.Attribute, ast.Name, ast.Load, ast.Constant, ast.BinOp, ast.UnaryOp),
    *(ast.USub, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow),
)
_SCOPES = ("torch", "nn", "functional", "dtype")
# By the number of dimensions of columns: what makes rows of them, in models and here, and columns of rows.
_TO_ROWS = {
    3: frozenset({"squeeze", "flatten", "view", "reshape", "getitem", "select"}),
    2: frozenset({"t", "T", "mT", "transpose", "permute", "swapaxes"}),
}
_ROW_OF, _COLUMN_OF = {3: "{0}.squeeze(2)", 2: "{0}.t()"}, {3: "{0}.unsqueeze(2)", 2: "{0}.t()"}
_IDLE = frozenset(
    {"size", "shape", "getitem", "unsqueeze", "t"}
)  # without effects: not needed where nothing reads them


@dataclass(frozen=True, slots=True)
class Rows:
    """Statements in rows, with the shapes of the new locals and of the Parameters in new forms."""

    statements: tuple[Statement, ...]
    shapes: Mapping[str, Shape]
    attributes: Mapping[str, tuple[int, ...]]


def rows_of_columns(
    statements: Sequence[Statement],
    shapes: Mapping[str, Shape],
    readers: Mapping[str, Collection[int]],
    attributes: Mapping[str, tuple[int, ...]],
) -> Rows:
    """The statements with those of columns as statements of rows, if a GEMM is among them.

    They are one canonical group, from the first to the last of them. What something else reads becomes a column again.
    The arguments are those of `canonical_runs`.
    """
    return Columns(statements, shapes, readers, attributes).rows() or Rows(tuple(statements), {}, {})


class Columns:
    """Converts the statements of one forward."""

    def __init__(
        self,
        statements: Sequence[Statement],
        shapes: Mapping[str, Shape],
        readers: Mapping[str, Collection[int]],
        attributes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._statements, self._shapes, self._readers, self._attributes = statements, shapes, readers, attributes
        self._converted = self._of_columns()
        views = (step for step in statements if self._is_row_view(step))
        self._names = {step.operands[0].text: step.target for step in reversed(list(views))}  # of rows, by column
        self._new: dict[str, Shape] = {}
        self._flat: dict[str, tuple[int, ...]] = {}
        self._rows: dict[str, Ref] = {}
        self._made: list[Statement] = []

    def rows(self) -> Rows | None:
        """The forward in rows; None where it has no columns, or their group has no end of its own."""
        ours = [place for place, step in enumerate(self._statements) if self._is_ours(step)]
        if not any(map(self._is_reason, (self._statements[place] for place in ours))):
            return None
        group, rest = self._statements[ours[0] : ours[-1] + 1], self._statements[ours[-1] + 1 :]
        if changes_in_place(group):
            return None
        for step in group:
            self._take(step)
        self._drop_unread(ours[-1])
        if self._made[-1].target != group[-1].target:
            return None
        self._made[0] = replace(self._made[0], written=tuple(traced_of(group)))
        return Rows((*self._statements[: ours[0]], *self._made, *rest), self._new, self._flat)

    def _is_reason(self, step: Statement) -> bool:
        """True for a statement that kernels take of rows: a GEMM."""
        return step.call is not None and step.target in self._converted

    def _of_columns(self) -> set[str]:
        """The targets of statements that make columns."""
        return {step.target for step in self._statements if self._is_of_columns(step)}

    def _is_ours(self, step: Statement) -> bool:
        return step.target in self._converted or self._is_row_view(step)

    def _take(self, step: Statement) -> None:
        """Adds what a statement becomes."""
        if self._is_row_view(step):
            if self._names[step.operands[0].text] != step.target:  # another of the same
                row = self._rows[step.operands[0].text]
                self._made.append(Statement(step.target, "flatten", "{0}.flatten(1)", (row,), note=step.note))
            return
        if step.target not in self._converted:
            self._made.append(replace(step, written=()))
            return
        self._made.append(self._linear(step, step.call) if step.call is not None else self._of_elements(step))
        row = self._rows[step.target] = Ref(RefKind.LOCAL, self._made[-1].target)
        others = [place for place in self._readers.get(step.target, ()) if not self._reads_row(place)]
        if others:
            text = self._column_text(self._shapes[step.target])
            self._made.append(Statement(step.target, _operation(text), text, (row,), note=step.note))

    def _reads_row(self, place: int) -> bool:
        return place < len(self._statements) and self._is_ours(self._statements[place])

    def _linear(self, step: Statement, call: SiteCall) -> Statement:
        (x,) = (ref for ref in step.operands if ref.kind is RefKind.LOCAL)
        (weight,) = (place for place, ref in enumerate(step.operands) if ref.kind is RefKind.ATTRIBUTE)
        text = call.weight.replace(f"{{{weight}}}", "{1}")
        template = f"torch.nn.functional.linear({{0}}, {text})"
        operands = (self._row(x), step.operands[weight])
        plain = SiteCall(call.site, "{0}", text, None, "{0}")
        return Statement(self._name(step.target), "linear", template, operands, plain, step.note)

    def _of_elements(self, step: Statement) -> Statement:
        operands = tuple(map(self._row, step.operands))
        return replace(step, target=self._name(step.target), operands=operands, written=())

    def _row(self, ref: Ref) -> Ref:
        """A column, or a Parameter of this shape, as a row."""
        if ref.kind is RefKind.ATTRIBUTE:
            sizes = self._attributes[ref.text]
            flat = Ref(RefKind.ATTRIBUTE, f"{ref.text}.flatten()")
            self._flat[flat.text] = (math.prod(sizes),)
            return flat
        if ref.text not in self._rows:  # made outside
            name = self._fresh(ref.text)
            text = self._row_text(self._shapes[ref.text])
            self._made.append(Statement(name, _operation(text), text, (ref,)))
            self._rows[ref.text] = Ref(RefKind.LOCAL, name)
        return self._rows[ref.text]

    def _name(self, column: str) -> str:
        return self._names.get(column) or self._fresh(column)

    def _fresh(self, column: str) -> str:
        name = f"{column}_row"
        while name in self._shapes or name in self._new:
            name += "_"
        self._new[name] = self._row_shape(self._shapes[column])
        return name

    def _drop_unread(self, last: int) -> None:
        """Drops columns and sizes that nothing reads any more."""
        place = len(self._made)
        while place > 0:
            place -= 1
            step = self._made[place]
            read = {ref.text for each in self._made for ref in each.operands}
            outside = any(reader > last for reader in self._readers.get(step.target, ()))
            if place and step.op in _IDLE and step.target not in read and not outside:
                del self._made[place]

    def _is_of_columns(self, step: Statement) -> bool:
        """True for a GEMM of a column, and for an operation of the elements of columns."""
        shape = self._shapes.get(step.target, ())
        alone = not step.written or step.written[-1].target == step.target  # not the first of two for one
        if not _is_column(shape) or not alone:
            return False
        return self._is_gemm(step, step.call, shape) if step.call is not None else self._is_even(step, shape)

    def _is_gemm(self, step: Statement, call: SiteCall, shape: Shape) -> bool:
        tensors = [ref for ref in step.operands if ref.kind is RefKind.LOCAL]
        weights = [ref for ref in step.operands if ref.kind is RefKind.ATTRIBUTE]
        if call.bias is not None or call.plus is not None or (len(tensors), len(weights)) != (1, 1):
            return False
        of = self._shapes.get(tensors[0].text, ())
        sizes = self._attributes.get(weights[0].text, ())
        return _is_column(of) and sorted(sizes) == sorted((_height(of), _height(shape)))

    def _is_even(self, step: Statement, shape: Shape) -> bool:
        if not is_of_elements(step):
            return False
        tensors = [ref for ref in step.operands if ref.kind is RefKind.LOCAL]
        return bool(tensors) and all(self._is_as_high(ref, shape) for ref in step.operands)

    def _is_as_high(self, ref: Ref, shape: Shape) -> bool:
        if ref.kind is RefKind.LOCAL:
            of = self._shapes.get(ref.text, ())
            return _is_column(of) and len(of) == len(shape) and _height(of) in (1, _height(shape))
        sizes = self._attributes.get(ref.text, ())
        return sizes == (1,) or (sizes[-2:] == (_height(shape), 1) and set(sizes[:-2]) <= {1})

    def _is_row_view(self, step: Statement) -> bool:
        """True for a view that makes rows of a converted column."""
        if not step.operands or step.operands[0].text not in self._converted:
            return False
        of = self._shapes[step.operands[0].text]
        return step.op in self._views(of) and self._shapes.get(step.target, ()) == self._row_shape(of)

    def _row_text(self, column: Shape) -> str:
        return _ROW_OF[len(column)]

    def _column_text(self, column: Shape) -> str:
        return _COLUMN_OF[len(column)]

    def _views(self, column: Shape) -> frozenset[str]:
        """The operations that may make a row of a column."""
        return _TO_ROWS[len(column)]

    def _row_shape(self, column: Shape) -> Shape:
        return (None, column[-2])


def is_of_elements(step: Statement) -> bool:
    """True for an operation on the elements of tensors, each by itself: a sum, a product, an activation, a cast."""
    node = expression(step)
    return step.op in _OF_ELEMENTS and node is not None and all(map(_is_plain, ast.walk(node)))


def _is_column(shape: Shape) -> bool:
    if len(shape) == 2:
        return shape[0] is not None and shape[1] is None
    return len(shape) == 3 and shape[0] is None and shape[1] is not None and shape[2] == 1


def _height(column: Shape) -> int:
    return column[-2] or 0


def _operation(template: str) -> str:
    return template.removeprefix("{0}.").partition("(")[0]


def _is_plain(node: ast.AST) -> bool:
    """True for a node of an expression of operations on elements."""
    if isinstance(node, ast.Attribute):
        return node.attr in _OF_ELEMENTS or node.attr in _SCOPES
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, str)
    return isinstance(node, _NODES)
