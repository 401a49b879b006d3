"""late_bias: the bias of a linear is added by a statement of its own.

y = linear(x, weight, bias)     ->     product = linear(x, weight)
                                       y = product + bias
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from loka.graph.expression import Call, local
from loka.graph.ir import ForwardIR, SiteCall, Statement
from loka.graph.sites.site import GemmKind
from loka.mods.protocols import SiteMod, UnplannedModel
from loka.mods.rewriting.rewriting_tools import free_names, linear_statement, with_statements
from loka.mods.rewriting.rewriting_tracer import OwnedChange, SiteChange
from loka.mods.rewriting.site_rewriting import ModelInChange, SiteOutcome
from loka.policy.policy import ModRule

NAME = "late_bias"


@dataclass(frozen=True, slots=True)
class LateBias(SiteChange):
    """One linear to split."""

    mod: ClassVar[str] = NAME

    def rewritten(self, forward: ForwardIR) -> ForwardIR:
        """The forward with every call of the site split."""
        name = free_names(forward)
        statements: list[Statement] = []
        for step in forward.statements:
            call = step.call
            if call is None or call.site != self.name or call.bias is None:
                statements.append(step)
            else:
                statements += _split(step, call, name("product"))
        return with_statements(forward, statements)


def _split(step: Statement, call: SiteCall, product: str) -> tuple[Statement, Statement]:
    plain = linear_statement(product, replace(call, bias=None), step.note)
    return plain, Statement(step.target, "add", Call("operator.add", (local(product), call.bias)), note=step.note)


@dataclass(frozen=True, slots=True)
class LateBiasMod:
    """Splits each linear in its own forward."""

    name: str = NAME
    exact: bool = True
    description: str = "the GEMM writes its product alone, and what reads it adds the bias"

    def rewrite_sites(self, model: ModelInChange, rule: ModRule) -> SiteOutcome:
        """Split what the entry is for."""
        outcome = SiteOutcome(model, rule)
        wanted = outcome.wanted()
        for site in wanted:
            if site.kind is not GemmKind.LINEAR or site.bias is None:
                outcome.leave([site.name], "it is no nn.Linear with a bias")
        split = [site for site in wanted if site.kind is GemmKind.LINEAR and site.bias is not None]
        model.capture({site.name: [site.name] for site in split})
        for site in split:
            for _, _, _, called in outcome.traced([site.name], site.name):
                (inner,) = called
                change = OwnedChange(site.name, LateBias(inner, (inner,)), linear=True)
                made = replace(site, kind=GemmKind.FUNCTIONAL_LINEAR, bias=None)
                outcome.take(change, [site.name], made, f"a bias of {site.n} is added later")
        return outcome

    def proposal(self, model: UnplannedModel) -> str | None:
        """How many linears have a bias."""
        count = sum(site.kind is GemmKind.LINEAR and site.bias is not None for site in model.sites)
        return f"{count} biases may be added later" if count else None


MOD: SiteMod = LateBiasMod()
