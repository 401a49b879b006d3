"""Sums, products and assignments in place, printed out of place where nobody can tell.

`y += x` is recorded as `y.add_(x)`: torch.fx records it as `y + x`, which has another dtype where x has a wider one, as
under autocast, and leaves other names of y's memory unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from loka.graph.ir import Ref, RefKind, Statement
from loka.graph.trace.assignments import Assignments

_NUMBERS = {"size", "dim", "numel", "nelement", "ndimension"}
_OF_NUMBERS = {
    operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
    operator.pow, operator.neg,
}  # fmt: skip
SUMS = frozenset(("add_", "sub_", "mul_", "div_"))  # methods that return what they write into
_WRITES: dict[str, Any] = {"add_": operator.add, "sub_": operator.sub, "mul_": operator.mul, "copy_": None}
_PLAIN = {"add_": ("add", "+"), "sub_": ("sub", "-")}  # the gradients of a product would be of another dtype


@dataclass(frozen=True, slots=True)
class Writes:
    """Recording of `y += x`, and of assignments that fill a new tensor."""

    in_place: bool = False  # in the dtype of y: as `y.add_(x)`, and a concatenation with a cast
    as_written: bool = False  # clones are made, and sums stay in place: each gradient is added up as in the forward


DEFAULT_WRITES = Writes()


class InPlaceTracer(fx.Tracer):
    """A tracer that records `y += x` as `y.add_(x)` if `in_place`, otherwise as `y + x`.

    Assignments that fill a new tensor are a concatenation, in the dtype of that tensor if `in_place`.
    """

    in_place = False
    writes_in_place = False  # True once the forward has a statement of this form

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.assignments = Assignments(self.is_size)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> fx.Proxy:
        """Records an operation; one that writes into a slice of a new tensor as an assignment."""
        if kind == "call_method" and target in _WRITES and len(args) == 2 and not kwargs and self._is_slice(args[0]):
            view, other = args
            value: fx.Proxy = other if target == "copy_" else _WRITES[target](view, other)
            self.writes_in_place = True
            self.assignments.write(view, value, self.place(), self.in_place)
            return value
        made = super().create_proxy(kind, target, args, kwargs, *rest, **named)
        self.assignments.see(made)
        return made

    def _is_slice(self, view: object) -> bool:
        return isinstance(view, fx.Proxy) and self.assignments.is_slice(view.node)

    def is_size(self, size: fx.Proxy, number: int) -> bool:
        """True if a traced size is this number in all calls, which is then checked."""
        return False

    def place(self) -> str:
        """The line of the user's code that is being traced, as text."""
        return ""


class InPlaceProxy(fx.Proxy):
    """A proxy of InPlaceTracer."""

    def __iadd__(self, other: Any) -> Any:
        return _recorded(self, "add_", operator.add, other)

    def __isub__(self, other: Any) -> Any:
        return _recorded(self, "sub_", operator.sub, other)

    def __imul__(self, other: Any) -> Any:
        return _recorded(self, "mul_", operator.mul, other)

    def __setitem__(self, index: Any, value: Any) -> None:
        tracer = self.tracer
        if not isinstance(tracer, InPlaceTracer):
            raise TypeError("item assignment")
        tracer.writes_in_place = True
        tracer.assignments.add(self, index, value, tracer.place(), tracer.in_place)

    def __itruediv__(self, other: Any) -> Any:
        return _recorded(self, "div_", operator.truediv, other)


def _recorded(proxy: fx.Proxy, method: str, function: Callable[[Any, Any], Any], other: Any) -> Any:
    tracer = proxy.tracer
    if not isinstance(tracer, InPlaceTracer) or _is_number(proxy.node):
        return function(proxy, other)
    tracer.writes_in_place = True
    if tracer.in_place or tracer.assignments.is_slice(proxy.node):
        return tracer.create_proxy("call_method", method, (proxy, other), {})
    return function(proxy, other)


def _is_number(node: fx.Node) -> bool:
    """True for a size, and for what is computed from sizes and constants alone."""
    if node.op == "call_method":
        return node.target in _NUMBERS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim")
    return node.target in _OF_NUMBERS and all(map(_is_number, node.all_input_nodes))


def sum_out_of_place(step: Statement, new: Collection[str], taken: set[str]) -> tuple[Statement, ...]:
    """`y.add_(x)` as a sum and a cast to y's dtype, if y is in `new`; the same for differences.

    Any other statement stays alone. `new` are new tensors that this statement alone reads, `taken` the names of locals,
    to which that of the sum is added.
    """
    op, sign = _PLAIN.get(step.op, ("", ""))
    if not op or step.operands[0].text not in new or step.target == "_":
        return (step,)
    other = step.template.removeprefix(f"{{0}}.{step.op}(").removesuffix(")")
    if other not in ("{0}", "{1}"):
        return (step,)
    name = f"{step.target}_wide"
    while name in taken:
        name += "_"
    taken.add(name)
    cast = (Ref(RefKind.LOCAL, name), step.operands[0])
    return (
        replace(step, target=name, op=op, template=f"{{0}} {sign} {other}"),
        replace(step, op="type_as", template="{0}.type_as({1})", operands=cast),
    )
