"""Planning of block_norm: the norms that can become norms over blocks, and the size of the blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from torch import nn

from loka.mods.adaptation import Adaptation, Setting, Unchanged
from loka.mods.dataflow import Adaptable
from loka.mods.mod_planning import Concern, ModMatch, ModRequest, ModuleModPlanning, SiteNeighbours
from loka.mods.norm_changes import block_of, unsupported_block
from loka.mods.structure import (
    every_name,
    grouped,
    held_elsewhere,
    inside_encoder_layer,
    short,
    type_of,
    unsupported_exchange,
)
from loka.policy import checks
from loka.policy.mod_schema import ModFields, power_of_two

NAME = "block_norm"
EPS = 1e-6  # for an nn.RMSNorm without eps
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_OPERATIONS = ("layer_norm", "rms_norm")


class BlockNormSetting(ModFields):
    """RMSNorm over fixed blocks, without parameters, for LayerNorm and RMSNorm. Matched: norms. A new model."""

    use: Literal["block_norm"] = Field(title="Mod", description="Norms over fixed blocks of the features.")
    block: Annotated[int, Field(ge=16, le=1024), AfterValidator(checks.power_of_two)] = power_of_two(
        16, 1024, 256, "Block", "Features that share one mean square. Default: 256."
    )


@dataclass(frozen=True, slots=True)
class BlockNormPlanning:
    """Replaces nn.LayerNorm and nn.RMSNorm over the last dimension by norms over blocks.

    Not exact: the result is a new model. No mean is subtracted, so that nothing cancels; no statistic spans more than a
    block, so that the norm fuses into the GEMM before it, and one outlier does not scale down a whole row in FP8;
    training and inference use the same blocks (LoKA, "Mods": BlockNorm, blocks of 256).

    The block is the largest power of two that divides the width, at most `block` and at least 16; a norm of a width
    without such a block is not changed. `eps` stays the norm's own (1e-6 for an nn.RMSNorm without one).

    Quality: NE was 0.09 +- 0.02 % worse on MovieTweetings (small Wukong, one epoch, four seeds), where rows are short.
    """

    name: str = NAME
    exact: bool = False
    description: str = (
        "norms over blocks, without mean and parameters: they fuse with the GEMM before, outliers stay local"
    )
    setting: type[ModFields] = BlockNormSetting
    opt_in: bool = False
    of_paper: bool = True

    def find(self, model: Adaptable, request: ModRequest) -> ModMatch:
        """The norms to replace. `request.settings`: block, a power of two."""
        most = int(request.settings.get("block", 256))
        names, held = every_name(model.module), held_elsewhere(model.module)
        found: list[tuple[str, str, tuple[tuple[str, Setting], ...]]] = []
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
        norms = {name for adaptation in match.adaptations for name in adaptation.modules}
        yield from _norm_among(site.after, norms, Concern.NORM_AFTER)
        yield from _norm_among(site.before, norms, Concern.NORM_BEFORE)


def _norm_among(functions: Mapping[str, str], norms: set[str], concern: Concern) -> Iterator[tuple[Concern, str]]:
    found = [owner for op, owner in functions.items() if op in _OPERATIONS and owner in norms]
    yield from ((concern, owner) for owner in found[:1])


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


PLANNING: ModuleModPlanning = BlockNormPlanning()
