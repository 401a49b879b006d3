"""no_bias: linears lose their biases, and checkpoints fold those that fold exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from loka.errors import InputError
from loka.mods.adaptation import Adaptation, Unchanged
from loka.mods.protocols import Concern, ModMatch, ModRequest, ModuleMod, SiteNeighbours
from loka.mods.structure import Found, every_name, grouped, inside_encoder_layer, parent_of, short, type_of

if TYPE_CHECKING:
    from loka.mods.dataflow import Adaptable

NAME = "no_bias"
FINAL = "a final prediction layer, which keeps its bias; 'final: drop' takes that too"


@dataclass(frozen=True, slots=True)
class NoBiasMod:
    """Removes the bias of nn.Linears, including subclasses with torch's own forward.

    Not exact, a new model: a norm after the linear, or the next linear's bias, can replace most of a bias, but not all
    of it. It saves the bias's addition, its gradient, which is a sum over all rows, and its memory traffic (LoKA,
    "Mods": the largest single gain in latency of the three).

    In checkpoints, a bias is folded into the linear that is the only and direct reader of the product, if that one
    keeps a bias: b2 + W2 b1, in float64; this is exact up to rounding. A bias of zeros is dropped. Any other is lost.

    Final prediction layers keep theirs, unless `final` is "drop", as it contains the mean of the predictions.

    Quality: a tower of raw dense features needs its biases, as thresholds. On MovieTweetings (small Wukong, one epoch)
    NE was 1.8 to 1.9 % worse without them, and changed by -0.01 +- 0.01 % if only these were kept: put that tower in
    `except`.
    """

    name: str = NAME
    exact: bool = False
    description: str = "no bias but in final prediction layers: no additions, no sums over all rows in backward"
    opt_in: bool = False
    of_paper: bool = True

    def find(self, model: Adaptable, request: ModRequest) -> ModMatch:
        """The linears that lose their biases. `request.settings`: final, "keep" or "drop"."""
        refusals = _Refusals(model, keep_final=request.settings.get("final", "keep") == "keep")
        dropped: dict[str, nn.Linear] = {}
        unchanged: list[Unchanged] = []
        for name, module in model.module.named_modules(remove_duplicate=False):
            if not request.wants(name):
                continue
            reason = refusals.reason(name, module)
            if reason is None and isinstance(module, nn.Linear):
                dropped[name] = module
            elif isinstance(module, nn.Linear) and _has_bias(module):
                unchanged.append(Unchanged(name, str(reason)))
            elif request.names(name):
                what = "has no bias" if isinstance(module, nn.Linear) else f"is a {short(module)}, no nn.Linear"
                unchanged.append(Unchanged(name, f"it {what}"))
        for _, owner, where in model.calls(request.wants, "linear"):
            unchanged.append(Unchanged(owner, f"it adds a bias in F.linear{where}: write an nn.Linear"))
        return ModMatch(_adaptations(dropped, _folds(dropped, model, refusals)), tuple(unchanged))

    def describe(self, adaptation: Adaptation, count: int) -> str:
        """Description of the change of `count` linears."""
        return "bias dropped" if count == 1 else "biases dropped"

    def suggest(self, match: ModMatch, site: SiteNeighbours) -> Iterator[tuple[Concern, str]]:
        """The site itself, if its bias is the concern."""
        if site.site in match.modules:
            yield Concern.BIAS, site.site

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


class _Refusals:
    """Finds the reason why a linear keeps its bias."""

    def __init__(self, model: Adaptable, keep_final: bool) -> None:
        self._model, self._keep_final = model, keep_final
        self._names = every_name(model.module)
        named = model.module.named_parameters(remove_duplicate=False)
        self._holders = Counter(id(parameter) for _, parameter in named)

    def reason(self, name: str, module: nn.Module) -> str | None:
        """Reason why a linear keeps its bias; None where it can be removed."""
        if not isinstance(module, nn.Linear):
            return "no nn.Linear"
        if isinstance(module, LazyModuleMixin):
            return "its sizes are not known yet; run the model once in the factory"
        if not _has_bias(module):
            return "it has no bias"
        if name and isinstance(parent_of(self._model.module, name), nn.MultiheadAttention):
            return "nn.MultiheadAttention reads its bias and never calls it"
        if inside_encoder_layer(self._model.module, name):
            return "nn.TransformerEncoderLayer reads its bias in evaluation, without calling it"
        if parametrize.is_parametrized(module):
            return "it is parametrised"
        if module._parameters.get("weight") is None:  # by torch.nn.utils.weight_norm
            return "its weight is no Parameter, but computed before each call: a checkpoint could not be converted"
        if type(module).forward is not nn.Linear.forward or "forward" in vars(module):
            return f"the forward of {short(module)} is its own, and may need the bias"
        return self._shared(name, module) or self._elsewhere(name)

    def _shared(self, name: str, linear: nn.Linear) -> str | None:
        others = [other for other in self._names[id(linear)] if other != name]
        if others:
            return f"it is '{others[0]}' too, one module under two names"
        return "its bias is shared: another module holds it too" if self.holders(linear.bias) > 1 else None

    def holders(self, parameter: nn.Parameter) -> int:
        """Number of names of a Parameter in the model."""
        return self._holders[id(parameter)]

    def _elsewhere(self, name: str) -> str | None:
        if name not in self._model.called:
            return "its forward is not called with the example inputs, so that its bias may be read elsewhere"
        reader = self._model.read.get(f"{name}.bias" if name else "bias")
        if reader is not None:
            return f"its bias is read outside of its own forward too, by '{reader}'"
        return FINAL if self._keep_final and name in self._model.final else None


def _has_bias(linear: nn.Linear) -> bool:
    return linear._parameters.get("bias") is not None or parametrize.is_parametrized(linear, "bias")


def _folds(dropped: Mapping[str, nn.Linear], model: Adaptable, refusals: _Refusals) -> dict[str, str]:
    """For each bias that can be folded, the linear it ends up in, possibly through others that are folded too."""
    modules = dict(model.module.named_modules())

    def takes(name: str) -> bool:
        linear = modules.get(name)
        if not isinstance(linear, nn.Linear) or parametrize.is_parametrized(linear):
            return False
        held = [linear._parameters.get(part) for part in ("weight", "bias")]
        return all(parameter is not None and refusals.holders(parameter) == 1 for parameter in held)

    folds: dict[str, str] = {}
    followed: set[str] = set()  # paths join: what is behind a linear is walked once
    for name in dropped:
        path = [name]
        while path[-1] in dropped and path[-1] not in followed:
            followed.add(path[-1])
            end = model.into.get(path[-1])
            if end is not None and takes(end):
                path.append(end)
        if path[-1] not in dropped or path[-1] in folds:
            folds.update(pairwise(path))
    return folds


def _adaptations(dropped: Mapping[str, nn.Linear], folds: Mapping[str, str]) -> tuple[Adaptation, ...]:
    """Adaptations: folded linears one by one, each before the one that takes its bias; then the rest together."""
    distances = _distances(folds)
    ordered = sorted(folds, key=lambda name: -distances[name])
    found: list[Found] = [(name, type_of(dropped[name]), (("into", folds[name]),)) for name in ordered]
    found += [(name, type_of(linear), ()) for name, linear in dropped.items() if name not in folds]
    return grouped(NAME, found)


def _distances(folds: Mapping[str, str]) -> dict[str, int]:
    """Number of linears that each bias is folded through."""
    distances: dict[str, int] = {}
    for name in folds:
        path = []
        while name in folds and name not in distances:
            path.append(name)
            name = folds[name]
        steps = distances.get(name, 0)
        for before in reversed(path):
            steps += 1
            distances[before] = steps
    return distances


def _check_sizes(name: str, bias: Tensor, features: torch.Size) -> None:
    """Raise InputError if a bias in a checkpoint does not fit the features of a weight that makes or reads them."""
    if bias.shape != features:
        raise InputError(
            f"the checkpoint's bias of {name!r} has shape {tuple(bias.shape)}, and a weight beside it asks for "
            f"{tuple(features)}: it is of another model"
        )


MOD: ModuleMod = NoBiasMod()
