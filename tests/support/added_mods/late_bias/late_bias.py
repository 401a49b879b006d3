"""late_bias: the bias of a linear is added by a statement of its own.

y = linear(x, weight, bias)     ->     product = linear(x, weight)
                                       y = product + bias
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from loka.graph.ir import ForwardIR, Ref, RefKind, SiteCall, Statement
from loka.mods.rewriting.rewriting_tools import (
    OperandTexts,
    fields_of,
    free_names,
    linear_statement,
    with_statements,
)

NAME = "late_bias"


@dataclass(frozen=True, slots=True)
class LateBias:
    """One linear to split; the site is named as in the forward."""

    site: str

    @property
    def mod(self) -> str:
        """As a policy writes it."""
        return NAME

    @property
    def reads(self) -> tuple[str, ...]:
        """The site whose calls are split."""
        return (self.site,)

    @property
    def makes(self) -> str:
        """The same site."""
        return self.site

    def under(self, rename: Callable[[str], str]) -> LateBias:
        """The same with its site under another name."""
        return LateBias(rename(self.site))

    def rewritten(self, forward: ForwardIR) -> ForwardIR:
        """The forward with every call of the site split."""
        name = free_names(forward)
        statements: list[Statement] = []
        for step in forward.statements:
            call = step.call
            if call is None or call.site != self.site or call.bias is None:
                statements.append(step)
            else:
                statements += _split(step, call, call.bias, name("product"))
        return with_statements(forward, statements)


def _split(step: Statement, call: SiteCall, bias: str, product: str) -> tuple[Statement, Statement]:
    texts = OperandTexts()
    x, weight = texts.take(call.x, step.operands), texts.take(call.weight, step.operands)
    plain = linear_statement(product, replace(call, x=x, weight=weight, bias=None), texts.refs, step.note)
    (place,) = fields_of(bias)
    added = (Ref(RefKind.LOCAL, product), step.operands[place])
    return plain, Statement(step.target, "add", "{0} + {1}", added, None, step.note)
