"""tanh_sigmoid, planned: the modules that are matched and whose forward may write a sigmoid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from loka.mods.tanh_sigmoid.tanh_sigmoid import NAME, NO_SIGMOID, without_sigmoids
from pydantic import Field
from torch import nn

from loka.graph.ir import ForwardIR
from loka.graph.source import functions_of, names_in
from loka.mods.adaptation import Setting
from loka.mods.mod_planning import OwnerModPlanning, UnplannedModel
from loka.mods.rewriting.rewriting_tracer import OwnerScope, RewrittenOwner
from loka.policy.mod_schema import ModFields


class TanhSigmoidSetting(ModFields):
    """Sigmoids by way of tanh. Matched: owners. The same function."""

    use: Literal["tanh_sigmoid"] = Field(title="Mod", description="Sigmoids by way of tanh.")


@dataclass(frozen=True, slots=True)
class TanhSigmoidPlanning:
    """Rewrites each module that names a sigmoid by itself."""

    name: str = NAME
    exact: bool = True
    description: str = "one hyperbolic tangent for an exponential and a division"
    setting: type[ModFields] = TanhSigmoidSetting
    nothing: str = NO_SIGMOID

    def scopes(self, model: nn.Module, wants: Callable[[str], bool]) -> tuple[OwnerScope, ...]:
        """The wanted modules that name a sigmoid, without what is in them."""
        wanted = {name: module for name, module in model.named_modules() if wants(name)}
        names = [name for name, module in wanted.items() if _names_sigmoid(module)]
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


def _names_sigmoid(module: nn.Module) -> bool:
    own = not type(module).__module__.startswith("torch.")
    return own and any("sigmoid" in names_in(function) for function in functions_of(module))


PLANNING: OwnerModPlanning = TanhSigmoidPlanning()
