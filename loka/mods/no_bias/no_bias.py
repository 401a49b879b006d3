"""Applies no_bias: linears lose their biases, and checkpoints fold those that fold exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.errors import InputError
from loka.mods.adaptation import Adaptation, ModelMod, Unchanged
from loka.mods.structure import type_of


@dataclass(frozen=True, slots=True)
class NoBiasMod:
    """Removes the bias of nn.Linears.

    In checkpoints, a bias is folded into the linear that is the only and direct reader of the product, if that one
    keeps a bias: b2 + W2 b1, in float64; this is exact up to rounding. A bias of zeros is dropped. Any other is lost.
    """

    exact: bool = False

    def unsupported_reason(self, model: nn.Module, name: str, adaptation: Adaptation) -> str | None:
        """Reason why its bias cannot be removed; None where it can."""
        linear = model.get_submodule(name)
        if type_of(linear) != adaptation.replaces:
            return f"is a {type_of(linear)}, not a {adaptation.replaces}"
        return None if linear._parameters.get("bias") is not None else "has no bias"

    def is_done(self, model: nn.Module, name: str, adaptation: Adaptation, last: bool) -> bool:
        """True if it is such a linear without a bias."""
        linear = model.get_submodule(name)
        return type_of(linear) == adaptation.replaces and linear._parameters.get("bias", linear) is None

    def change(self, model: nn.Module, adaptation: Adaptation) -> None:
        """Remove the biases."""
        for name in adaptation.modules:
            model.get_submodule(name)._parameters["bias"] = None

    def convert(self, state: dict[str, Tensor], adaptation: Adaptation) -> tuple[Unchanged, ...]:
        """Fold or drop the biases."""
        into = str(dict(adaptation.settings).get("into", ""))
        lost = []
        for name in adaptation.modules:
            own = state[f"{name}.weight" if name else "weight"]  # in every checkpoint, original or adapted
            bias = state.pop(f"{name}.bias" if name else "bias", None)
            if bias is None:
                continue  # the checkpoint is of the adapted model
            _check_sizes(name, bias, own.shape[:1])
            if into:
                weight, total = state[f"{into}.weight"], state[f"{into}.bias"]
                _check_sizes(name, bias, weight.shape[1:])
                folded = total.double() + weight.double() @ bias.to(weight.device, torch.float64)
                state[f"{into}.bias"] = folded.to(total.dtype)
            elif bias.is_meta or bool(bias.any()):
                size = "" if bias.is_meta else f", of up to {float(bias.detach().abs().max()):.3g}"
                reason = f"a bias{size}, and no linear that keeps its own reads the product alone"
                lost.append(Unchanged(f"{name}.bias" if name else "bias", reason))
        return tuple(lost)


def _check_sizes(name: str, bias: Tensor, features: torch.Size) -> None:
    """Raise InputError if a bias in a checkpoint does not fit the features of a weight that makes or reads them."""
    if bias.shape != features:
        raise InputError(
            f"the checkpoint's bias of {name!r} has shape {tuple(bias.shape)}, and a weight beside it asks for "
            f"{tuple(features)}: it is of another model"
        )


MOD: ModelMod = NoBiasMod()
