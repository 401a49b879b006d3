"""six_relu: every nn.ReLU of a model becomes nn.ReLU6."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from loka.mods.adaptation import Adaptation, Unchanged
from loka.mods.protocols import Concern, ModMatch, ModRequest, ModuleMod, SiteNeighbours
from loka.mods.structure import exchange, grouped, short, type_of, why_another

if TYPE_CHECKING:
    from loka.mods.dataflow import Adaptable


@dataclass(frozen=True, slots=True)
class SixReluMod:
    """Every nn.ReLU that is matched."""

    name: str = "six_relu"
    exact: bool = False
    description: str = "activations are bounded, so that the scale of what reads them is"
    opt_in: bool = False
    of_paper: bool = False

    def find(self, model: Adaptable, request: ModRequest) -> ModMatch:
        """The activations to exchange."""
        modules = {name: module for name, module in model.module.named_modules() if request.wants(name)}
        found = [(name, type_of(module), ()) for name, module in modules.items() if type(module) is nn.ReLU]
        taken = {name for name, _, _ in found}
        other = [name for name in modules if name not in taken and request.names(name)]
        left = (Unchanged(name, f"it is a {short(modules[name])}, no nn.ReLU") for name in other)
        return ModMatch(grouped(self.name, found), tuple(left))

    def describe(self, adaptation: Adaptation, count: int) -> str:
        """What becomes of each activation."""
        return "ReLU -> ReLU6"

    def suggest(self, match: ModMatch, site: SiteNeighbours) -> Iterator[tuple[Concern, str]]:
        """Nothing: what the graph tells of neighbours are SiLUs and sigmoids."""
        yield from ()

    def unsupported_reason(self, model: nn.Module, name: str, adaptation: Adaptation) -> str | None:
        """Why the activation is not the one that was found."""
        return why_another(model.get_submodule(name), adaptation.replaces)

    def is_done(self, model: nn.Module, name: str, adaptation: Adaptation, last: bool) -> bool:
        """Whether the nn.ReLU6 is there."""
        return type(model.get_submodule(name)) is nn.ReLU6

    def change(self, model: nn.Module, adaptation: Adaptation) -> None:
        """Put them in their places."""
        exchange(model, adaptation.modules, nn.ReLU6)

    def convert(self, state: dict[str, Tensor], adaptation: Adaptation) -> tuple[Unchanged, ...]:
        """Nothing to do: activations have no Parameters."""
        return ()


MOD: ModuleMod = SixReluMod()
