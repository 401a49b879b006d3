"""block_norm: norms over a whole row become parameter-free RMSNorms over blocks of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from loka.mods.adaptation import Adaptation, Unchanged
from loka.mods.norms import BlockNorm, block_of, unsupported_block, without_affine
from loka.mods.protocols import Concern, ModMatch, ModRequest, ModuleMod, SiteNeighbours
from loka.mods.structure import (
    Found,
    every_name,
    exchange,
    grouped,
    held_elsewhere,
    inside_encoder_layer,
    short,
    type_of,
    unsupported_exchange,
    why_another,
)

if TYPE_CHECKING:
    from loka.mods.dataflow import Adaptable

NAME = "block_norm"
EPS = 1e-6  # for an nn.RMSNorm without eps
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_OPERATIONS = ("layer_norm", "rms_norm")


@dataclass(frozen=True, slots=True)
class BlockNormMod:
    """Replaces nn.LayerNorm and nn.RMSNorm over the last dimension by `loka.mods.norms.BlockNorm`.

    Not exact: the result is a new model. No mean is subtracted, so that nothing cancels; no statistic spans more than a
    block, so that the norm fuses into the GEMM before it, and one outlier does not scale down a whole row in FP8;
    training and inference use the same blocks (LoKA, "Mods": BlockNorm, blocks of 256).

    The block is the largest power of two that divides the width, at most `block` and at least 16; a norm of a width
    without such a block is not changed. `eps` stays the norm's own (1e-6 for an nn.RMSNorm without one). A norm with
    several names in the model is replaced by one BlockNorm under all of them. In checkpoints, weights of ones and
    biases of zeros are dropped, any other is lost.

    Quality: NE was 0.09 +- 0.02 % worse on MovieTweetings (small Wukong, one epoch, four seeds), where rows are short.
    """

    name: str = NAME
    exact: bool = False
    description: str = (
        "norms over blocks, without mean and parameters: they fuse with the GEMM before, outliers stay local"
    )
    opt_in: bool = False
    of_paper: bool = True

    def find(self, model: Adaptable, request: ModRequest) -> ModMatch:
        """The norms to replace. `request.settings`: block, a power of two."""
        most = int(request.settings.get("block", 256))
        names, held = every_name(model.module), held_elsewhere(model.module)
        found: list[Found] = []
        unchanged: list[Unchanged] = []
        for name, module in model.module.named_modules(remove_duplicate=False):
            if not request.wants(name):
                continue
            reason = _unsupported_reason(model.module, name, module, held)
            others = [other for other in names[id(module)] if not request.wants(other)]
            if reason is None and others:
                reason = f"it is '{others[0]}' too, which the mod does not match"
            if isinstance(module, _NORMS) and reason is None:
                width = int(module.normalized_shape[0])
                block = block_of(width, most)
                if block is not None:
                    eps = EPS if module.eps is None else float(module.eps)
                    found.append((name, type_of(module), (("block", block), ("eps", eps), ("width", width))))
                else:
                    unchanged.append(Unchanged(name, unsupported_block(width)))
            elif isinstance(module, _NORMS) or request.names(name):
                unchanged.append(Unchanged(name, str(reason)))
        for op, owner, where in model.calls(request.wants, "layer_norm", "rms_norm"):
            unchanged.append(Unchanged(owner, f"it calls F.{op}{where}: write an nn module for it"))
        return ModMatch(grouped(self.name, found), tuple(unchanged))

    def describe(self, adaptation: Adaptation, count: int) -> str:
        """Description of the change: "LayerNorm -> BlockNorm 256"."""
        block = dict(adaptation.settings).get("block", "")
        return f"{adaptation.replaces.rpartition('.')[2]} -> BlockNorm {block}".strip()

    def suggest(self, match: ModMatch, site: SiteNeighbours) -> Iterator[tuple[Concern, str]]:
        """The norms next to a site."""
        for concern, functions in ((Concern.NORM_AFTER, site.after), (Concern.NORM_BEFORE, site.before)):
            norms = [owner for op, owner in functions.items() if op in _OPERATIONS and owner in match.modules]
            yield from ((concern, owner) for owner in norms[:1])

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
        exchange(model, adaptation.modules, lambda: BlockNorm(int(settings["block"]), float(settings["eps"])))

    def convert(self, state: dict[str, Tensor], adaptation: Adaptation) -> tuple[Unchanged, ...]:
        """Remove the norms' weights and biases."""
        return tuple(lost for name in adaptation.modules for lost in without_affine(state, name))


def _unsupported_reason(model: nn.Module, name: str, module: nn.Module, held: dict[int, str]) -> str | None:
    """Reason why a module cannot become a BlockNorm, apart from its width; None where it can."""
    if not isinstance(module, _NORMS):
        return f"it is a {short(module)}, no nn.LayerNorm or nn.RMSNorm"
    if type(module) not in _NORMS:
        return f"it is a {short(module)}, a norm of its own kind"
    if len(module.normalized_shape) != 1:
        return f"it normalises {len(module.normalized_shape)} dimensions together, not the last alone"
    if inside_encoder_layer(model, name):
        return "nn.TransformerEncoderLayer reads its weight in evaluation, without calling it"
    if not name:
        return "it is the model itself"
    return unsupported_exchange(module, held)


MOD: ModuleMod = BlockNormMod()
