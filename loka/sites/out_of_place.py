"""Activations that a forward writes in place, computed out of place where nobody can tell.

nn.ReLU(inplace=True) behind a linear changes what the linear made, which nothing else reads: the function is the same
out of place, and autograd keeps the same tensors. Written so, the statement has no effect but its result, and whoever
rewrites the forward may move it.
"""

from __future__ import annotations

from dataclasses import replace

from loka.sites.chains import readers_of
from loka.sites.regions import ACTIVATIONS, ELEMENTWISE, NORMS
from loka.sites.straight import RefKind, Statement, StraightForward

IN_PLACE = "inplace=True"
# Operations whose result is a new tensor, never a view of an operand, and is not written into one (`out=`).
_MAKING = ACTIVATIONS | ELEMENTWISE | NORMS | {"linear", "matmul", "bmm", "baddbmm", "addmm", "addcmul", "cat", "stack"}


def out_of_place(forward: StraightForward) -> StraightForward:
    """The forward with those activations out of place that alone read a tensor which the statement before made."""
    readers = readers_of(forward)
    statements: list[Statement] = []
    making: set[str] = set()  # targets that hold a new tensor
    for step in forward.statements:
        alone = [ref.text for ref in step.operands if ref.kind is RefKind.LOCAL and len(readers[ref.text]) == 1]
        if step.op in ACTIVATIONS and IN_PLACE in step.template and making.intersection(alone) and step.target != "_":
            step = replace(step, template=step.template.replace(IN_PLACE, "inplace=False"))
        if step.op in _MAKING and IN_PLACE not in step.template and "out=" not in step.template:
            making.add(step.target)
        statements.append(step)
    return replace(forward, statements=tuple(statements))
