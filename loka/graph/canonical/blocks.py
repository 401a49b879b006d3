"""Blocks as rows: what a forward computes of tensors (B, f, d) around products that make such, computed of (B, f * d).

`torch.einsum("br,fdr->bfd", x, W)` by a Parameter of three dimensions so becomes the linear of rows that it is, with
the bias, the products and the sums after it. So does a norm over both f and d, where `flatten` comes after it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from loka.graph.canonical.columns import Columns, Rows
from loka.graph.ir import Ref, RefKind, SiteCall, Statement
from loka.graph.trace.observed_shapes import Shape

_MADE = re.compile(r"\{0\}\.unflatten\(-1, \(\d+, \d+\)\)")
_READ = re.compile(r"(\{\d+\})\.flatten\(-2\)")
_PLAIN = re.compile(r"\{\d+\}")
_PRODUCTS = frozenset({"mul", "multiply", "addcmul"})
_NORMS = frozenset({"layer_norm", "rms_norm"})
_TO_ROWS = frozenset({"flatten", "view", "reshape"})


def rows_of_blocks(
    statements: Sequence[Statement],
    shapes: Mapping[str, Shape],
    readers: Mapping[str, Collection[int]],
    attributes: Mapping[str, tuple[int, ...]],
) -> Rows:
    """The statements with those of blocks as statements of rows, if a GEMM or a norm makes one.

    A sum of a block and something else stays one of blocks, unless the block was multiplied, as in a cross layer.
    """
    return _Blocks(statements, shapes, readers, attributes).rows() or Rows(tuple(statements), {}, {})


class _Blocks(Columns):
    """Converts the statements of one forward that compute blocks."""

    def _of_columns(self) -> set[str]:
        found: set[str] = set()
        multiplied: set[str] = set()
        for step in self._statements:
            if step.call is not None:
                found.update({step.target} if self._makes_block(step, step.call) else ())
                continue
            read = {ref.text for ref in step.operands if ref.kind is RefKind.LOCAL}
            if self._is_norm(step):
                found.add(step.target)
            if not read & found or not self._is_even(step, self._shapes.get(step.target, ())):
                continue
            product = step.op in _PRODUCTS or bool(read & multiplied)
            if product or read <= found:
                found.add(step.target)
                multiplied.update({step.target} if product else ())
        return found

    def _is_reason(self, step: Statement) -> bool:
        return super()._is_reason(step) or self._is_norm(step)

    def _is_norm(self, step: Statement) -> bool:
        """True for a norm over all of a block, of which rows alone are read."""
        shape = self._shapes.get(step.target, ())
        whole = f", ({', '.join(map(str, shape[1:]))})"
        if step.op not in _NORMS or step.call is not None or not _is_block(shape) or whole not in step.template:
            return False
        readers = [self._statements[place : place + 1] for place in self._readers.get(step.target, ())]
        rows = [reader[0] for reader in readers if reader and reader[0].op in _TO_ROWS]
        flat = all(self._shapes.get(reader.target) == self._row_shape(shape) for reader in rows)
        return flat and 0 < len(rows) == len(readers) and all(self._is_as_high(ref, shape) for ref in step.operands)

    def _of_elements(self, step: Statement) -> Statement:
        made = super()._of_elements(step)
        if not self._is_norm(step):
            return made
        shape = self._shapes[step.target]
        whole, width = f", ({', '.join(map(str, shape[1:]))})", self._row_shape(shape)[1]
        return replace(made, template=step.template.replace(whole, f", ({width},)"))

    def _is_ours(self, step: Statement) -> bool:
        return super()._is_ours(step) or (step.call is not None and self._reads_block(step, step.call))

    def _take(self, step: Statement) -> None:
        if step.call is not None and step.target not in self._converted and self._reads_block(step, step.call):
            self._made.append(self._linear(step, step.call))
        else:
            super()._take(step)

    def _linear(self, step: Statement, call: SiteCall) -> Statement:
        (x,) = (ref for ref in step.operands if ref.kind is RefKind.LOCAL)
        (weight,) = (ref for ref in step.operands if ref.kind is RefKind.ATTRIBUTE)
        text = call.weight.replace(f"{{{step.operands.index(weight)}}}", "{1}")
        row = self._row(x) if _READ.fullmatch(call.x) else x
        target = self._name(step.target) if step.target in self._converted else step.target
        plain = SiteCall(call.site, "{0}", text, None, "{0}")
        template = f"torch.nn.functional.linear({{0}}, {text})"
        return Statement(target, "linear", template, (row, weight), plain, step.note)

    def _makes_block(self, step: Statement, call: SiteCall) -> bool:
        """True for a GEMM of rows, or of a block, that makes a block."""
        return (
            _is_block(self._shapes.get(step.target, ()))
            and _MADE.fullmatch(call.out) is not None
            and (_PLAIN.fullmatch(call.x) is not None or self._reads(step, call))
            and _is_alone(step, call)
        )

    def _reads_block(self, step: Statement, call: SiteCall) -> bool:
        """True for a GEMM of all of a block, that makes rows."""
        return call.out == "{0}" and self._reads(step, call) and _is_alone(step, call)

    def _reads(self, step: Statement, call: SiteCall) -> bool:
        of = [self._shapes.get(ref.text, ()) for ref in step.operands if ref.kind is RefKind.LOCAL]
        return _READ.fullmatch(call.x) is not None and len(of) == 1 and _is_block(of[0])

    def _is_as_high(self, ref: Ref, shape: Shape) -> bool:
        if ref.kind is RefKind.LOCAL:
            return _is_block(shape) and self._shapes.get(ref.text) == shape
        sizes = self._attributes.get(ref.text, ())
        return sizes == (1,) or (sizes[-2:] == shape[1:] and set(sizes[:-2]) <= {1})

    def _row_text(self, column: Shape) -> str:
        return "{0}.flatten(1)"

    def _column_text(self, column: Shape) -> str:
        return f"{{0}}.unflatten(1, ({column[1]}, {column[2]}))"

    def _views(self, column: Shape) -> frozenset[str]:
        return _TO_ROWS

    def _row_shape(self, column: Shape) -> Shape:
        return (None, math.prod(size or 0 for size in column[1:]))


def _is_block(shape: Shape) -> bool:
    return len(shape) == 3 and shape[0] is None and None not in shape[1:]


def _is_alone(step: Statement, call: SiteCall) -> bool:
    """True for a GEMM of one local and one Parameter, without a sum."""
    kinds = sorted(ref.kind for ref in step.operands)
    return call.bias is None and call.plus is None and kinds == sorted((RefKind.LOCAL, RefKind.ATTRIBUTE))
