"""Checks at the start of a generated forward: other arguments than planned run the module's own forward."""

from __future__ import annotations

from collections.abc import Sequence

from loka.codegen.modules import statement_text
from loka.codegen.modules.signature import Argument
from loka.codegen.text.layout import call
from loka.graph.entry_guards import negated
from loka.templating.wrap import WIDTH


def own_forward_lines(guards: Sequence[str], arguments: Sequence[Argument], indent: int) -> list[str]:
    """`if mask is not None: return super().forward(x, mask)`; no lines without guards. Raises LokaError."""
    if not guards:
        return []
    names = [argument.name for argument in arguments if argument.name]
    checks = [statement_text.checked(negated(guard), [*names, "self"]) for guard in guards]
    margin = " " * indent
    condition = [f"{margin}if {' or '.join(checks)}:"]
    if len(condition[0]) > WIDTH:
        condition = [f"{margin}if (", *_one_a_line(checks, f"{margin}    "), f"{margin}):"]
    product = call("super().forward", _passed(arguments))
    said = f"{margin}# Other arguments than planned: the module's own forward."
    return [said, *condition, f"{margin}    return {product}"]


def _one_a_line(checks: Sequence[str], margin: str) -> list[str]:
    return [f"{margin}{'or ' if number else ''}{check}" for number, check in enumerate(checks)]


def _passed(arguments: Sequence[Argument]) -> list[str]:
    """The arguments as they are passed on; those after "*" by name."""
    passed, by_name = [], False
    for argument in arguments:
        if argument.name:
            named = f"{argument.name}=" if by_name and not argument.mark else argument.mark
            passed.append(named + argument.name)
        by_name = by_name or argument.mark == "*"
    return passed
