"""Planning of norm_first: the norms that can move before their linears, to bound the scale of a site's input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from pydantic import Field
from torch import nn

from loka.mods.adaptation import Adaptation, Setting, Unchanged
from loka.mods.dataflow import Adaptable
from loka.mods.mod_modules import BlockNorm
from loka.mods.mod_planning import Concern, ModMatch, ModRequest, ModuleModPlanning, SiteNeighbours
from loka.mods.norm_changes import block_of, unsupported_block
from loka.mods.structure import every_name, grouped, held_elsewhere, short, type_of, unsupported_exchange
from loka.policy.mod_schema import ModFields

NAME = "norm_first"
_NORMS = (nn.LayerNorm, nn.RMSNorm, BlockNorm)
_NARROWEST = 2  # a norm of one element keeps at most its sign


class NormFirstSetting(ModFields):
    """Normalise the input of a linear rather than its output. Matched: linears. A new model, to be trained."""

    use: Literal["norm_first"] = Field(title="Mod", description="Normalise the input of a linear, not its output.")


@dataclass(frozen=True, slots=True)
class NormFirstPlanning:
    """In an nn.Sequential, [linear, norm] becomes [norm, linear]: the norm is applied to the linear's input.

    Patterns match the linear. Both keep their names, and only their order in the nn.Sequential changes, so that
    state_dict keys stay, and `sequential[0]` is the norm. A norm whose width differs from the linear's input is
    replaced by one of the same kind; a BlockNorm's block follows the rule of block_norm, and does not grow. If norms
    become BlockNorms too, either mod may come first.

    Not exact, a new model. The operand of the site's fprop and wgrad has a root mean square of one in every row, so
    that a static FP8 scale stays valid, whatever the layers before it do. The linear's output is no longer normalised
    (LoKA, "Mods", has norms after linears; this mod is for sites whose inputs drift).
    """

    name: str = NAME
    exact: bool = False
    description: str = "the norm is of the linear's input: its scale is bounded, so that a static scale holds"
    setting: type[ModFields] = NormFirstSetting
    opt_in: bool = True  # for inputs that drift, which a profile shows
    of_paper: bool = False

    def find(self, model: Adaptable, request: ModRequest) -> ModMatch:
        """The pairs to swap."""
        found: list[tuple[str, str, tuple[tuple[str, Setting], ...]]] = []
        unchanged: dict[str, str] = {}
        named: list[str] = []
        names, held = every_name(model.module), held_elsewhere(model.module)
        pairs = dict(_pairs(model.module))
        for linear, (norm, container) in pairs.items():
            if not request.wants(linear):
                continue
            reason = _unsupported_reason(model, linear, norm, container, names, held)
            if reason is not None:
                unchanged[linear] = reason
            else:
                named.append(linear)
                found.append((norm, type_of(model.module.get_submodule(norm)), _settings(model.module, linear, norm)))
        for name, module in model.module.named_modules():
            if name not in pairs and request.names(name):
                what = "is not followed by a norm in an nn.Sequential"
                unchanged[name] = f"it {what}" if isinstance(module, nn.Linear) else f"it is a {short(module)}"
        left = tuple(Unchanged(*item) for item in unchanged.items())
        return ModMatch(grouped(self.name, found), left, tuple(named))

    def describe(self, adaptation: Adaptation, count: int) -> str:
        """Description of the change: "LayerNorm before its linear"."""
        return f"{adaptation.replaces.rpartition('.')[2]} before its linear"

    def suggest(self, match: ModMatch, site: SiteNeighbours) -> Iterator[tuple[Concern, str]]:
        """The site itself, if its input is the concern."""
        if site.site in match.named:
            yield Concern.INPUT_SIZES, site.site


def _pairs(model: nn.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Each linear that a norm follows in an nn.Sequential: its name, the norm's and the nn.Sequential's."""
    for name, container in model.named_modules():
        if not isinstance(container, nn.Sequential):
            continue
        for (first, linear), (second, norm) in pairwise(container._modules.items()):
            if isinstance(linear, nn.Linear) and isinstance(norm, _NORMS):
                yield f"{name}.{first}".lstrip("."), (f"{name}.{second}".lstrip("."), name)


def _unsupported_reason(
    model: Adaptable,
    linear: str,
    norm: str,
    container: str,
    names: dict[int, tuple[str, ...]],
    held: dict[int, str],
) -> str | None:
    """Reason why a linear and its norm cannot be swapped; None where they can."""
    parts = [model.module.get_submodule(name) for name in (linear, norm, container)]
    site, norm_module, sequential = parts
    for part in parts:
        if len(names[id(part)]) > 1:
            return f"'{names[id(part)][0]}' is '{names[id(part)][1]}' too, one module under two names"
    if type(norm_module) not in _NORMS:
        return f"its norm is a {short(norm_module)}, a norm of its own kind"
    shape = getattr(norm_module, "normalized_shape", (0,))
    if len(shape) != 1:
        return f"its norm normalises {len(shape)} dimensions together, not the last alone"
    if type(sequential).forward is not nn.Sequential.forward or "forward" in vars(sequential):
        return f"the forward of {short(sequential)}, which holds it and its norm, is its own"
    if container not in model.called:
        return "the nn.Sequential around it is not called as a whole with the example inputs"
    width = int(getattr(site, "in_features", 0))
    if width < _NARROWEST:
        return f"its input has {width} feature{'s' if width != 1 else ''}, too few for a norm"
    if isinstance(norm_module, BlockNorm) and block_of(width, norm_module.block) is None:
        return f"its norm is of blocks, and for its input {unsupported_block(width)}"
    reason = unsupported_exchange(norm_module, held)
    return None if reason is None else f"of its norm: {reason}"


def _settings(model: nn.Module, linear: str, norm: str) -> tuple[tuple[str, Setting], ...]:
    """The linear's name within the nn.Sequential, its sizes, and the block of a BlockNorm."""
    site, before = model.get_submodule(linear), model.get_submodule(norm)
    width, outputs = int(getattr(site, "in_features", 0)), int(getattr(site, "out_features", 0))
    found: tuple[tuple[str, Setting], ...] = (
        ("linear", linear.rpartition(".")[2]),
        ("outputs", outputs),
        ("width", width),
    )
    block = block_of(width, before.block) if isinstance(before, BlockNorm) else None
    return found if block is None else (("block", block), *found)


PLANNING: ModuleModPlanning = NormFirstPlanning()
