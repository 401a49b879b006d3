"""ReLU6, carried out: nn.ReLU becomes nn.ReLU6."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from loka.mods.adaptation import Adaptation, ModelMod, Unchanged
from loka.mods.structure import exchange, why_another


@dataclass(frozen=True, slots=True)
class SixReluMod:
    """Puts an nn.ReLU6 in the place of every nn.ReLU."""

    exact: bool = False

    def unsupported_reason(self, model: nn.Module, name: str, adaptation: Adaptation) -> str | None:
        """Why the activation is not the one that was found."""
        return why_another(model.get_submodule(name), adaptation.replaces)

    def is_done(self, model: nn.Module, name: str, adaptation: Adaptation, last: bool) -> bool:
        """Whether the nn.ReLU6 is there."""
        return type(model.get_submodule(name)) is nn.ReLU6

    def change(self, model: nn.Module, adaptation: Adaptation) -> None:
        """Put them in their places."""
        exchange(model, {name: nn.ReLU6() for name in adaptation.modules})

    def convert(self, state: dict[str, Tensor], adaptation: Adaptation) -> tuple[Unchanged, ...]:
        """Nothing to do: activations have no Parameters."""
        return ()


MOD: ModelMod = SixReluMod()
