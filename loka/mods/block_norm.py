"""BlockNorm: norms over a whole row become parameter-free RMSNorms over blocks of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from loka.mods.adaptation import Adaptation, Setting, Unchanged
from loka.mods.block_widths import block_of, unsupported_block
from loka.mods.mod import Adaptable, ModMatch, ModRequest
from loka.mods.mod_modules import BlockNorm
from loka.mods.structure import (
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

EPS = 1e-6  # of an nn.RMSNorm that has none of its own
_NORMS = (nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True, slots=True)
class BlockNormMod:
    """Puts `loka.mods.mod_modules.BlockNorm` in the places of nn.LayerNorm and nn.RMSNorm over the last dimension.

    Not exact, a new model. No mean is subtracted, so that nothing cancels; no statistic spans more than a block, so
    that it fuses into the GEMM before it, and one outlier does not shrink a whole row in FP8; training and inference
    use the same blocks (LoKA, "Mods": BlockNorm, blocks of 256).

    Widths: the block is the largest power of two that divides the width, `block` at most and 16 at least; a norm of
    a width without such a block is left as it is. `eps` stays the norm's own (1e-6 for an nn.RMSNorm without one).
    A norm that has several names in the model gets one BlockNorm under all of them.

    Quality: NE was 0.09 +- 0.02 % worse on MovieTweetings (small Wukong, one epoch, four seeds), where rows are short.

    Checkpoints: weights of ones and biases of zeros go, any other is lost.
    """

    name: str = "block_norm"
    exact: bool = False
    promise: str = "norms over blocks, without mean and parameters: they fuse with the GEMM before, outliers stay local"

    def find(self, model: Adaptable, asked: ModRequest) -> ModMatch:
        """The norms to exchange. `asked.settings`: block, a power of two."""
        most = int(asked.settings.get("block", 256))
        names, held = every_name(model.module), held_elsewhere(model.module)
        found: list[tuple[str, str, tuple[tuple[str, Setting], ...]]] = []
        unchanged: list[Unchanged] = []
        for name, module in model.module.named_modules(remove_duplicate=False):
            if not asked.wants(name):
                continue
            reason = _unsupported_reason(model.module, name, module, held)
            others = [other for other in names[id(module)] if not asked.wants(other)]
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
            elif isinstance(module, _NORMS) or asked.names(name):
                unchanged.append(Unchanged(name, str(reason)))
        for op, owner, where in model.calls(asked, "layer_norm", "rms_norm"):
            unchanged.append(Unchanged(owner, f"it calls F.{op}{where}: write an nn module for it"))
        return ModMatch(grouped(self.name, found), tuple(unchanged))

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


def without_affine(state: dict[str, Tensor], name: str) -> tuple[Unchanged, ...]:
    """Take a norm's weight and bias out of a state_dict; those that are not ones and zeros are told."""
    lost = []
    for part, neutral in (("weight", 1.0), ("bias", 0.0)):
        key = f"{name}.{part}" if name else part
        value = state.pop(key, None)
        if value is not None and (value.is_meta or not bool((value == neutral).all())):
            size = (
                "" if value.is_meta else f", up to {float((value.detach() - neutral).abs().max()):.3g} off {neutral:g}"
            )
            lost.append(Unchanged(key, f"a norm's {part}{size}, which the adapted model has no place for"))
    return tuple(lost)


def _unsupported_reason(model: nn.Module, name: str, module: nn.Module, held: dict[int, str]) -> str | None:
    """Why a module cannot become a BlockNorm, its width apart."""
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
