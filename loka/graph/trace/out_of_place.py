"""Sums, products and activations in place, printed out of place where nobody can tell."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from loka.graph.expression import Call, RefKind, local, method, writes
from loka.graph.ir import ForwardIR, Statement
from loka.graph.patterns.linear_chain import readers_of
from loka.graph.patterns.region import NORM_MODULES, NORMS
from loka.graph.sites.flow import ACTIVATIONS, ELEMENTWISE
from loka.graph.sites.op_names import CLAMPS
from loka.graph.source import has_hooks

_PLAIN = {"add_": "add", "sub_": "sub", "mul_": "mul", "div_": "truediv"}  # methods that return what they write into
_ALONE = ACTIVATIONS | CLAMPS | {"masked_fill"}  # functions of each element
# Operations that return a new tensor, never a view of an operand, unless written into one (`out=`).
_VIEWS = frozenset(
    {"view", "view_as", "reshape", "flatten", "unflatten", "transpose", "permute", "unsqueeze", "squeeze"}
)
MAKING = _ALONE | ELEMENTWISE | NORMS | {"linear", "matmul", "bmm", "baddbmm", "addmm", "addcmul", "cat", "stack"}


def makes_its_result(child: nn.Module) -> bool:
    """True if a child always returns a new tensor."""
    return type(child) in (nn.Linear, nn.BatchNorm1d, *NORM_MODULES) and not has_hooks(child)


def out_of_place(forward: ForwardIR, made: Collection[str] = ()) -> ForwardIR:
    """The forward with in-place activations, sums and products out of place where they alone read a new tensor.

    `made` names locals returned by children that are new tensors.
    """
    readers = readers_of(forward)
    statements: list[Statement] = []
    making = set(made)  # targets that are new tensors
    taken = {name.partition("=")[0].lstrip("*") for name in forward.arguments}
    taken.update(step.target for step in forward.statements)
    for step in forward.statements:
        alone = [ref.text for ref in step.operands if ref.kind is RefKind.LOCAL and len(readers[ref.text]) == 1]
        called, plain = step.value, step.op.removesuffix("_")
        if isinstance(called, Call) and plain in _ALONE and making.intersection(alone) and step.target != "_":
            kwargs = tuple((name, False if name == "inplace" else value) for name, value in called.kwargs)
            target = called.target.removesuffix("_") if step.op != plain else called.target  # x.relu_()
            step = replace(step, op=plain, value=replace(called, target=target, kwargs=kwargs))
        steps = _sum_out_of_place(step, making.intersection(alone), taken)
        of_first = bool(step.operands) and step.operands[0].text in making.intersection(alone)
        of_new = of_first and step.op in _PLAIN.keys() | _VIEWS
        if (step.op in MAKING and not writes(step.value)) or of_new:
            making.add(step.target)
        statements += steps
    return replace(forward, statements=tuple(statements))


def _sum_out_of_place(step: Statement, new: Collection[str], taken: set[str]) -> tuple[Statement, ...]:
    """`y.add_(x)` as a sum and a cast to y's dtype, if y is in `new`; the same for differences and products.

    Any other statement stays alone. `new` are new tensors that this statement alone reads, `taken` the names of locals,
    to which that of the sum is added.
    """
    op, called = _PLAIN.get(step.op), step.value
    if op is None or not isinstance(called, Call) or step.operands[0].text not in new or step.target == "_":
        return (step,)
    if called.target != f".{step.op}" or called.kwargs:
        return (step,)
    name = f"{step.target}_wide"
    while name in taken:
        name += "_"
    taken.add(name)
    return (
        replace(step, target=name, op=op, value=replace(called, target=f"operator.{op}")),
        replace(step, op="type_as", value=method(local(name), "type_as", called.args[0])),
    )
