"""Hard Swish, carried out: SiLU and the sigmoids of SwishNorms, without exponentials."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from loka.mods.adaptation import Adaptation, ModelMod, Unchanged
from loka.mods.structure import exchange, why_another


@dataclass(frozen=True, slots=True)
class HardSwishMod:
    """nn.SiLU becomes nn.Hardswish, not in place, and nn.Sigmoid nn.Hardsigmoid.

    Checkpoints: they have no parameters, so that nothing changes.
    """

    exact: bool = False

    def unsupported_reason(self, model: nn.Module, name: str, adaptation: Adaptation) -> str | None:
        """Why the activation is not the one that was found."""
        return why_another(model.get_submodule(name), adaptation.replaces)

    def is_done(self, model: nn.Module, name: str, adaptation: Adaptation, last: bool) -> bool:
        """Whether the hard one is there."""
        return type(model.get_submodule(name)) is _hard(adaptation.replaces)

    def change(self, model: nn.Module, adaptation: Adaptation) -> None:
        """Put the hard ones in their places."""
        old = {name: model.get_submodule(name) for name in adaptation.modules}
        made = {id(module): _hard(adaptation.replaces)() for module in old.values()}
        exchange(model, {name: made[id(module)] for name, module in old.items()})

    def convert(self, state: dict[str, Tensor], adaptation: Adaptation) -> tuple[Unchanged, ...]:
        """Nothing to do: activations have no parameters."""
        return ()


def _hard(replaces: str) -> type[nn.Hardswish] | type[nn.Hardsigmoid]:
    return nn.Hardswish if replaces.endswith(".SiLU") else nn.Hardsigmoid


MOD: ModelMod = HardSwishMod()
