"""ReLU6, planned: every nn.ReLU of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field
from torch import nn

from loka.mods.adaptation import Adaptation, Unchanged
from loka.mods.dataflow import Adaptable
from loka.mods.mod_planning import Concern, ModMatch, ModRequest, ModuleModPlanning, SiteNeighbours
from loka.mods.structure import grouped, short, type_of
from loka.policy.mod_schema import ModFields


class SixReluSetting(ModFields):
    """ReLU6 for ReLU. Matched: activations. A new model, to be trained."""

    use: Literal["six_relu"] = Field(title="Mod", description="ReLU6 for ReLU.")


@dataclass(frozen=True, slots=True)
class SixReluPlanning:
    """Every nn.ReLU that is matched."""

    name: str = "six_relu"
    exact: bool = False
    description: str = "activations are bounded, so that the scale of what reads them is"
    setting: type[ModFields] = SixReluSetting
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


PLANNING: ModuleModPlanning = SixReluPlanning()
