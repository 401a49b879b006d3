"""norm_first: the norm after a linear moves to the linear's input, to bound its scale."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from loka.mods.adaptation import Adaptation, Setting, Unchanged
from loka.mods.norms import BlockNorm, block_of, unsupported_block, without_affine
from loka.mods.protocols import Concern, ModMatch, ModRequest, ModuleMod, SiteNeighbours
from loka.mods.structure import (
    Found,
    every_name,
    grouped,
    held_elsewhere,
    parent_of,
    short,
    type_of,
    unsupported_exchange,
    why_another,
)

if TYPE_CHECKING:
    from loka.mods.dataflow import Adaptable

NAME = "norm_first"
_NORMS = (nn.LayerNorm, nn.RMSNorm, BlockNorm)
_NARROWEST = 2  # a norm of one element keeps at most its sign


@dataclass(frozen=True, slots=True)
class NormFirstMod:
    """In an nn.Sequential, [linear, norm] becomes [norm, linear]: the norm is applied to the linear's input.

    Patterns match the linear. Both keep their names, and only their order in the nn.Sequential changes, so that
    state_dict keys stay, and `sequential[0]` is the norm. A norm whose width differs from the linear's input is
    replaced by one of the same kind; a BlockNorm's block follows the rule of block_norm, and does not grow. If norms
    become BlockNorms too, either mod may come first.

    In checkpoints, the linear's Parameters stay. Of a replaced norm, weights of ones and biases of zeros are converted;
    any other is lost.

    Not exact, a new model. The operand of the site's fprop and wgrad has a root mean square of one in every row, so
    that a static FP8 scale stays valid, whatever the layers before it do. The linear's output is no longer normalised
    (LoKA, "Mods", has norms after linears; this mod is for sites whose inputs drift).
    """

    name: str = NAME
    exact: bool = False
    description: str = "the norm is of the linear's input: its scale is bounded, so that a static scale holds"
    opt_in: bool = True  # for inputs that drift, which a profile shows
    of_paper: bool = False

    def find(self, model: Adaptable, request: ModRequest) -> ModMatch:
        """The pairs to swap."""
        found: list[Found] = []
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

    def unsupported_reason(self, model: nn.Module, name: str, adaptation: Adaptation) -> str | None:
        """Reason why the norm is not the planned one after the planned linear; None where it is."""
        settings, norm = dict(adaptation.settings), model.get_submodule(name)
        other = why_another(norm, adaptation.replaces)
        if other is not None:
            return other
        keys, linear = _places(model, name, adaptation)
        if not isinstance(linear, nn.Linear) or keys.index(_last(name)) != keys.index(str(settings["linear"])) + 1:
            return f"does not follow the linear '{settings['linear']}' in an nn.Sequential"
        sizes = (linear.in_features, linear.out_features)
        wanted = (settings["width"], settings["outputs"])
        return (
            None if sizes == wanted else f"follows a linear of {sizes[0]} to {sizes[1]}, not {wanted[0]} to {wanted[1]}"
        )

    def is_done(self, model: nn.Module, name: str, adaptation: Adaptation, last: bool) -> bool:
        """True if the norm is before the linear and has the width of the linear's input."""
        settings, norm = dict(adaptation.settings), model.get_submodule(name)
        keys, linear = _places(model, name, adaptation)
        if linear is None or keys.index(_last(name)) + 1 != keys.index(str(settings["linear"])):
            return False
        if not last:
            return True
        if type(norm) is BlockNorm:
            return norm.block == settings.get("block")
        return type_of(norm) == adaptation.replaces and getattr(norm, "normalized_shape", None) == (settings["width"],)

    def change(self, model: nn.Module, adaptation: Adaptation) -> None:
        """Move the norms before their linears."""
        settings = dict(adaptation.settings)
        width, linear = int(settings["width"]), str(settings["linear"])
        for name in adaptation.modules:
            container = parent_of(model, name)._modules
            norm = container[_last(name)]
            same = width == settings["outputs"] and not isinstance(norm, BlockNorm)
            made = norm if same else _resized(norm, width, int(settings.get("block", 0)))
            order = [key for key in container if key != _last(name)]
            order.insert(order.index(linear), _last(name))
            moved = {**container, _last(name): made}
            container.clear()
            container.update((key, moved[key]) for key in order)

    def convert(self, state: dict[str, Tensor], adaptation: Adaptation) -> tuple[Unchanged, ...]:
        """Replace the Parameters of norms whose width changes."""
        settings = dict(adaptation.settings)
        width, lost = int(settings["width"]), list[Unchanged]()
        for name in adaptation.modules if width != settings["outputs"] else ():
            old = {part: state.get(f"{name}.{part}") for part in ("weight", "bias")}
            if all(value is None or tuple(value.shape) == (width,) for value in old.values()):
                continue  # the checkpoint is of the adapted model
            lost += without_affine(state, name)
            for part, make in (("weight", torch.ones), ("bias", torch.zeros)):
                value = old[part]
                if value is not None:
                    state[f"{name}.{part}"] = make(width, dtype=value.dtype, device=value.device)
        return tuple(lost)


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


def _resized(norm: nn.Module | None, width: int, block: int) -> nn.Module:
    """A norm of the same kind for another width, with the same mode, dtype and device."""
    if isinstance(norm, BlockNorm):
        return BlockNorm(block, norm.eps).train(norm.training)
    if not isinstance(norm, nn.LayerNorm | nn.RMSNorm):
        raise TypeError(f"a {type(norm).__name__} is no norm that can be made for another width")
    weight = norm.weight if norm.elementwise_affine else None
    where = {} if weight is None else {"device": weight.device, "dtype": weight.dtype}
    made: nn.LayerNorm | nn.RMSNorm
    if isinstance(norm, nn.LayerNorm):
        has_bias = norm.bias is not None
        made = nn.LayerNorm(width, norm.eps, norm.elementwise_affine, bias=has_bias, **where)
    else:
        made = nn.RMSNorm(width, norm.eps, norm.elementwise_affine, **where)
    for name, parameter in norm.named_parameters():
        made.get_parameter(name).requires_grad_(parameter.requires_grad)
    return made.train(norm.training)


def _places(model: nn.Module, name: str, adaptation: Adaptation) -> tuple[list[str], nn.Module | None]:
    """Names of the norm's siblings, in order, and the linear; None where there is none of its name."""
    children = parent_of(model, name)._modules
    return list(children), children.get(str(dict(adaptation.settings)["linear"]))


def _last(name: str) -> str:
    return name.rpartition(".")[2]


MOD: ModuleMod = NormFirstMod()
