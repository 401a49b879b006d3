"""Applies block_norm: norms over a whole row become parameter-free RMSNorms over blocks of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from loka.mods.adaptation import Adaptation, ModelMod, Unchanged
from loka.mods.mod_modules import BlockNorm
from loka.mods.norm_changes import without_affine
from loka.mods.structure import exchange, why_another


@dataclass(frozen=True, slots=True)
class BlockNormMod:
    """Replaces nn.LayerNorm and nn.RMSNorm over the last dimension by `loka.mods.mod_modules.BlockNorm`.

    A norm with several names in the model is replaced by one BlockNorm under all of them. In checkpoints, weights of
    ones and biases of zeros are dropped, any other is lost.
    """

    exact: bool = False

    def unsupported_reason(self, model: nn.Module, name: str, adaptation: Adaptation) -> str | None:
        """Reason why the norm is not the planned one; None where it is."""
        norm, width = model.get_submodule(name), dict(adaptation.settings)["width"]
        shape = tuple(getattr(norm, "normalized_shape", ()))
        other = None if shape == (width,) else f"normalises {shape}, not ({width},)"
        return why_another(norm, adaptation.replaces) or other

    def is_done(self, model: nn.Module, name: str, adaptation: Adaptation, last: bool) -> bool:
        """True if the BlockNorm is in place."""
        norm, settings = model.get_submodule(name), dict(adaptation.settings)
        if type(norm) is not BlockNorm:
            return False
        return not last or (norm.block, norm.eps) == (settings["block"], settings["eps"])

    def change(self, model: nn.Module, adaptation: Adaptation) -> None:
        """Replace the norms by BlockNorms."""
        settings = dict(adaptation.settings)
        old = {name: model.get_submodule(name) for name in adaptation.modules}
        made = {id(norm): BlockNorm(int(settings["block"]), float(settings["eps"])) for norm in old.values()}
        exchange(model, {name: made[id(norm)] for name, norm in old.items()})

    def convert(self, state: dict[str, Tensor], adaptation: Adaptation) -> tuple[Unchanged, ...]:
        """Remove the norms' weights and biases."""
        return tuple(lost for name in adaptation.modules for lost in without_affine(state, name))


MOD: ModelMod = BlockNormMod()
