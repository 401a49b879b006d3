"""tanh_sigmoid: sigmoid(x) is computed as (1 + tanh(x / 2)) / 2, which is the same function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from loka.graph.expression import Arg, Call
from loka.graph.ir import ForwardIR
from loka.graph.sites.flow import Flow
from loka.graph.source import has_own_forward
from loka.mods.adaptation import Setting
from loka.mods.protocols import OwnerMod, UnplannedModel
from loka.mods.rewriting.rewriting_tools import with_statements
from loka.mods.rewriting.rewriting_tracer import OwnerScope, RewrittenOwner, writer_of

NAME = "tanh_sigmoid"
NO_SIGMOID = "its forward has no sigmoid of a local"
_SIGMOIDS = ("torch.sigmoid", "torch.nn.functional.sigmoid", ".sigmoid")


def without_sigmoids(forward: ForwardIR, means: Callable[[str], bool]) -> RewrittenOwner | str:
    """The forward with the sigmoids that are meant computed otherwise, or why it stays."""
    statements, targets = list(forward.statements), []
    for place, step in enumerate(forward.statements):
        value = step.value
        if isinstance(value, Call) and value.target in _SIGMOIDS and means(writer_of(forward, place)):
            statements[place] = replace(step, op="tanh", value=_by_tanh(*value.args))
            targets.append(step.target)
    if not targets:
        return NO_SIGMOID
    return RewrittenOwner(with_statements(replace(forward, regions=()), statements), tuple(targets))


def _by_tanh(x: Arg) -> Call:
    tanh = Call("torch.tanh", (Call("operator.mul", (0.5, x)),))
    return Call("operator.add", (0.5, Call("operator.mul", (0.5, tanh))))


@dataclass(frozen=True, slots=True)
class TanhSigmoidMod:
    """Rewrites each module whose own forward has a sigmoid."""

    name: str = NAME
    exact: bool = True
    description: str = "one hyperbolic tangent for an exponential and a division"
    nothing: str = NO_SIGMOID

    def scopes(self, model: nn.Module, wants: Callable[[str], bool], flow: Flow) -> tuple[OwnerScope, ...]:
        """The wanted modules with a sigmoid, without what is in them."""
        own = [name for name, module in model.named_modules() if wants(name) and has_own_forward(module)]
        names = [name for name in own if "sigmoid" in flow.operations.get(name, ())]
        return tuple(OwnerScope(NAME, name, (name,), ()) for name in names)

    def inner(self, scope: OwnerScope, model: nn.Module) -> tuple[OwnerScope, ...]:
        """None: a scope is one module."""
        return ()

    def rewrite(
        self, forward: ForwardIR, means: Callable[[str], bool], settings: Mapping[str, Setting]
    ) -> RewrittenOwner | str:
        """The forward with other sigmoids."""
        return without_sigmoids(forward, means)

    def describe(self, count: int, settings: Mapping[str, Setting]) -> str:
        """So many sigmoids."""
        return f"{count} sigmoid{'s' if count > 1 else ''} by way of tanh"

    def proposal(self, model: UnplannedModel) -> str | None:
        """None: nothing that can be seen without a forward."""
        return None


MOD: OwnerMod = TanhSigmoidMod()
