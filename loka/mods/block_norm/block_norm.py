"""BlockNorm, carried out: norms over a whole row become parameter-free RMSNorms over blocks of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from loka.mods.adaptation import Adaptation, ModelMod, Unchanged
from loka.mods.mod_modules import BlockNorm
from loka.mods.norm_changes import without_affine
from loka.mods.structure import exchange, why_another


@dataclass(frozen=True, slots=True)
class BlockNormMod:
    """Puts `loka.mods.mod_modules.BlockNorm` in the places of nn.LayerNorm and nn.RMSNorm over the last dimension.

    A norm that has several names in the model gets one BlockNorm under all of them. Checkpoints: weights of ones and
    biases of zeros go, any other is lost.
    """

    exact: bool = False

    def unsupported_reason(self, model: nn.Module, name: str, adaptation: Adaptation) -> str | None:
        """Why the norm is not the one that was found."""
        norm, width = model.get_submodule(name), dict(adaptation.settings)["width"]
        shape = tuple(getattr(norm, "normalized_shape", ()))
        other = None if shape == (width,) else f"normalises {shape}, not ({width},)"
        return why_another(norm, adaptation.replaces) or other

    def is_done(self, model: nn.Module, name: str, adaptation: Adaptation, last: bool) -> bool:
        """Whether the BlockNorm is there."""
        norm, settings = model.get_submodule(name), dict(adaptation.settings)
        if type(norm) is not BlockNorm:
            return False
        return not last or (norm.block, norm.eps) == (settings["block"], settings["eps"])

    def change(self, model: nn.Module, adaptation: Adaptation) -> None:
        """Put BlockNorms in the norms' places."""
        settings = dict(adaptation.settings)
        old = {name: model.get_submodule(name) for name in adaptation.modules}
        made = {id(norm): BlockNorm(int(settings["block"]), float(settings["eps"])) for norm in old.values()}
        exchange(model, {name: made[id(norm)] for name, norm in old.items()})

    def convert(self, state: dict[str, Tensor], adaptation: Adaptation) -> tuple[Unchanged, ...]:
        """Take the norms' weights and biases out."""
        return tuple(lost for name in adaptation.modules for lost in without_affine(state, name))


MOD: ModelMod = BlockNormMod()
