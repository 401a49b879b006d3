"""ReLUs of other spellings: they compute the same, but their gradients at 0 may differ."""

from __future__ import annotations

from dataclasses import replace

from loka.graph.ir import ForwardIR


def with_written_relus(forward: ForwardIR) -> ForwardIR:
    """The forward with each canonical ReLU as it is written, which has the gradient at 0 of the model's own."""
    steps = (step.written if step.op == "relu" and step.written else (step,) for step in forward.statements)
    return replace(forward, statements=tuple(each for written in steps for each in written))
