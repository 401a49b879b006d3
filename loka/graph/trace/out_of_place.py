"""Activations that a forward writes in place, computed out of place where nobody can tell.

nn.ReLU(inplace=True) behind a linear changes what the linear made, which nothing else reads: the function is the same
out of place, and autograd keeps the same tensors. Written so, the statement has no effect but its result, and whoever
rewrites the forward may move it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from loka.graph.ir import ForwardIR, RefKind, Statement
from loka.graph.patterns.linear_chain import readers_of
from loka.graph.patterns.region import ACTIVATIONS, ELEMENTWISE, NORMS
from loka.graph.source import has_hooks

_IN_PLACE = "inplace=True"
# Operations whose result is a new tensor, never a view of an operand, and is not written into one (`out=`).
_MAKING = ACTIVATIONS | ELEMENTWISE | NORMS | {"linear", "matmul", "bmm", "baddbmm", "addmm", "addcmul", "cat", "stack"}


def makes_its_result(child: nn.Module) -> bool:
    """Whether what a child gives is a new tensor whatever it is called with."""
    return type(child) in (nn.Linear, nn.LayerNorm, nn.RMSNorm) and not has_hooks(child)


def out_of_place(forward: ForwardIR, made: Collection[str] = ()) -> ForwardIR:
    """The forward with those activations out of place that alone read a tensor which a statement before made.

    `made` names locals that children give, and that are new tensors.
    """
    readers = readers_of(forward)
    statements: list[Statement] = []
    making = set(made)  # targets that hold a new tensor
    for step in forward.statements:
        alone = [ref.text for ref in step.operands if ref.kind is RefKind.LOCAL and len(readers[ref.text]) == 1]
        if step.op in ACTIVATIONS and _IN_PLACE in step.template and making.intersection(alone) and step.target != "_":
            step = replace(step, template=step.template.replace(_IN_PLACE, "inplace=False"))
        if step.op in _MAKING and _IN_PLACE not in step.template and "out=" not in step.template:
            making.add(step.target)
        statements.append(step)
    return replace(forward, statements=tuple(statements))
