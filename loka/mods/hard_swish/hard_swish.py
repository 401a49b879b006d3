"""Applies hard_swish: SiLU and the sigmoids of SwishNorms without exponentials."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from loka.mods.adaptation import Adaptation, ModelMod, Unchanged
from loka.mods.structure import exchange, why_another


@dataclass(frozen=True, slots=True)
class HardSwishMod:
    """Replaces nn.SiLU by nn.Hardswish, not in place, and nn.Sigmoid by nn.Hardsigmoid.

    Checkpoints do not change, as these have no parameters.
    """

    exact: bool = False

    def unsupported_reason(self, model: nn.Module, name: str, adaptation: Adaptation) -> str | None:
        """Reason why the activation is not the planned one; None where it is."""
        return why_another(model.get_submodule(name), adaptation.replaces)

    def is_done(self, model: nn.Module, name: str, adaptation: Adaptation, last: bool) -> bool:
        """True if the hard activation is in place."""
        return type(model.get_submodule(name)) is _hard(adaptation.replaces)

    def change(self, model: nn.Module, adaptation: Adaptation) -> None:
        """Replace the activations by hard ones."""
        old = {name: model.get_submodule(name) for name in adaptation.modules}
        made = {id(module): _hard(adaptation.replaces)() for module in old.values()}
        exchange(model, {name: made[id(module)] for name, module in old.items()})

    def convert(self, state: dict[str, Tensor], adaptation: Adaptation) -> tuple[Unchanged, ...]:
        """Activations have no parameters, so nothing changes."""
        return ()


def _hard(replaces: str) -> type[nn.Hardswish] | type[nn.Hardsigmoid]:
    return nn.Hardswish if replaces.endswith(".SiLU") else nn.Hardsigmoid


MOD: ModelMod = HardSwishMod()
