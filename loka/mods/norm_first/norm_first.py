"""Applies norm_first: the norm after a linear moves to the linear's input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.mods.adaptation import Adaptation, ModelMod, Unchanged
from loka.mods.mod_modules import BlockNorm
from loka.mods.norm_changes import without_affine
from loka.mods.structure import parent_of, type_of, why_another


@dataclass(frozen=True, slots=True)
class NormFirstMod:
    """In an nn.Sequential, [linear, norm] becomes [norm, linear]; both keep their names.

    A norm whose width differs from the linear's input is replaced by one of the same kind and the right width, with
    ones and zeros.

    In checkpoints, the linear's Parameters stay. Of a replaced norm, weights of ones and biases of zeros are converted;
    any other is lost.
    """

    exact: bool = False

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


MOD: ModelMod = NormFirstMod()
