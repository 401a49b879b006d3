"""Which sums and products of a traced forward are of tensors of one shape: seen by running the printed text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from loka.sites.examples import Examples, copy_tree
from loka.sites.straight import RefKind, Statement, StraightForward

_OPERATIONS = frozenset({"add", "mul"})
_SEEN = "loka_saw_shapes"  # what the text calls; no forward of a user has it


def with_even_statements(
    forward: StraightForward, examples: Examples, copied: Callable[[], nn.Module]
) -> StraightForward:
    """The forward with `even` set for each sum and product whose locals all had the result's shape in every example.

    `copied` makes a copy of the module. The forward has passed the identity gate, so that its text runs.
    """
    wanted = {index for index, statement in enumerate(forward.statements) if _is_pair(statement)}
    if not wanted or not examples.calls:
        return forward
    even = set(wanted)

    def saw(index: int, *values: object) -> None:
        shapes = {tuple(value.shape) if isinstance(value, torch.Tensor) else None for value in values}
        if len(shapes) != 1 or None in shapes:
            even.discard(index)

    module = copied()
    flags = [(child, child.training) for child in module.modules()]
    scope: dict[str, Any] = {"torch": torch, _SEEN: saw}
    exec(compile(_text(forward, wanted), f"<shapes of {forward.owner!r}>", "exec"), scope)  # noqa: S102 - own text
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            module.eval()
            for call in examples.calls:
                scope["forward"](module, *copy_tree(call.args), **copy_tree(call.kwargs))
    finally:
        for child, flag in flags:
            child.training = flag
    marked = (replace(step, even=True) if index in even else step for index, step in enumerate(forward.statements))
    return replace(forward, statements=tuple(marked))


def _is_pair(statement: Statement) -> bool:
    locals_read = [ref for ref in statement.operands if ref.kind is RefKind.LOCAL]
    two = len(locals_read) == len(statement.operands) == 2
    return two and statement.op in _OPERATIONS and statement.call is None and statement.target != "_"


def _text(forward: StraightForward, wanted: set[int]) -> str:
    """The forward as Python, each wanted statement followed by a call that shows its tensors."""
    lines = [f"def forward({', '.join(('self', *forward.arguments))}):"]
    for index, statement in enumerate(forward.statements):
        lines.append(f"    {statement.text()}")
        if index in wanted:
            shown = ", ".join([str(index), statement.target, *(ref.text for ref in statement.operands)])
            lines.append(f"    {_SEEN}({shown})")
    return "\n".join([*lines, f"    return {forward.result}", ""])
