"""tanh_sigmoid: sigmoid(x) is computed as (1 + tanh(x / 2)) / 2, which is the same function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from loka.graph.ir import ForwardIR
from loka.mods.rewriting.rewriting_tools import with_statements
from loka.mods.rewriting.rewriting_tracer import RewrittenOwner, writer_of

NAME = "tanh_sigmoid"
NO_SIGMOID = "its forward has no sigmoid of a local"
_SIGMOIDS = ("torch.sigmoid({0})", "torch.nn.functional.sigmoid({0})", "{0}.sigmoid()")


def without_sigmoids(forward: ForwardIR, means: Callable[[str], bool]) -> RewrittenOwner | str:
    """The forward with the sigmoids that are meant computed otherwise, or why it stays."""
    statements, targets = list(forward.statements), []
    for place, step in enumerate(forward.statements):
        if step.template in _SIGMOIDS and means(writer_of(forward, place)):
            statements[place] = replace(step, op="tanh", template="0.5 + 0.5 * torch.tanh(0.5 * {0})")
            targets.append(step.target)
    if not targets:
        return NO_SIGMOID
    return RewrittenOwner(with_statements(replace(forward, regions=()), statements), tuple(targets))
