"""hard_swish: SiLU and the sigmoids of SwishNorms become activations without exponentials."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from loka.mods.adaptation import Adaptation, Unchanged
from loka.mods.protocols import Concern, ModMatch, ModRequest, ModuleMod, SiteNeighbours
from loka.mods.structure import (
    Found,
    every_name,
    exchange,
    grouped,
    held_elsewhere,
    short,
    type_of,
    unsupported_exchange,
    why_another,
)

if TYPE_CHECKING:
    from loka.mods.dataflow import Adaptable

NAME = "hard_swish"
_OPERATIONS = ("silu", "sigmoid")


@dataclass(frozen=True, slots=True)
class HardSwishMod:
    """x * ReLU6(x + 3) / 6 in place of x * sigmoid(x); in SwishNorm, x * sigmoid(norm(x)), the sigmoid becomes hard.

    An nn.SiLU becomes nn.Hardswish, not in place. An nn.Sigmoid whose result only multiplies its own input, or its
    norm's input, becomes nn.Hardsigmoid: that of torchrec's SwishLayerNorm, and of any module of that form. Patterns
    match the SiLU, or the module whose forward has the product.

    Not exact, a new model: it differs by up to 0.142, at 3 and -3. It has no exponential, so that it costs little in
    the epilogue of a GEMM, and is exactly zero or x outside [-3, 3] (LoKA, "Mods": Hard Swish).

    Quality: NE differed by -0.02 +- 0.02 % on MovieTweetings (small Wukong, one epoch, four seeds).
    """

    name: str = NAME
    exact: bool = False
    description: str = "Swish without exponentials: it fuses with the norm before it, and its range is known"
    opt_in: bool = False
    of_paper: bool = True

    def find(self, model: Adaptable, request: ModRequest) -> ModMatch:
        """The activations to replace."""
        names, held = every_name(model.module), held_elsewhere(model.module)
        swishes = {id(model.module.get_submodule(name)) for name in model.swishes}
        found: list[Found] = []
        unchanged: list[Unchanged] = []
        named: list[str] = []
        for name, module in model.module.named_modules(remove_duplicate=False):
            swish = id(module) in swishes
            matched_name = _multiplier(model.module, name) if swish else name
            if not request.wants(matched_name):
                continue
            reason = unsupported_exchange(module, held)
            every = [_multiplier(model.module, other) if swish else other for other in names[id(module)]]
            others = [other for other in every if not request.wants(other)]
            if not swish and type(module) is not nn.SiLU:
                if isinstance(module, nn.SiLU) or (request.names(name) and not _has_swish(module, swishes)):
                    unchanged.append(Unchanged(name, f"it is a {short(module)}, neither an nn.SiLU nor a SwishNorm"))
            elif reason is not None or others or not name:
                shared = (
                    f"it is '{others[0]}' too, which the mod does not match" if others else "it is the model itself"
                )
                unchanged.append(Unchanged(matched_name, reason or shared))
            else:
                named.append(matched_name)
                found.append((name, type_of(module), ()))
        for op, owner, where in model.calls(request.wants, "silu", "sigmoid"):
            what = "calls F.silu" if op == "silu" else "multiplies by a sigmoid of what it multiplies"
            unchanged.append(Unchanged(owner, f"it {what}{where}: write an nn module for it"))
        return ModMatch(grouped(self.name, found), tuple(unchanged), tuple(named))

    def describe(self, adaptation: Adaptation, count: int) -> str:
        """Description of the change: "SiLU -> Hardswish"."""
        return f"{adaptation.replaces.rpartition('.')[2]} -> {_hard(adaptation.replaces).__name__}"

    def suggest(self, match: ModMatch, site: SiteNeighbours) -> Iterator[tuple[Concern, str]]:
        """The activation that makes a site's input."""
        found = [owner for op, owner in site.before.items() if op in _OPERATIONS and owner in match.modules]
        yield from ((Concern.ACTIVATION_BEFORE, owner) for owner in found[:1])

    def unsupported_reason(self, model: nn.Module, name: str, adaptation: Adaptation) -> str | None:
        """Reason why the activation is not the planned one; None where it is."""
        return why_another(model.get_submodule(name), adaptation.replaces)

    def is_done(self, model: nn.Module, name: str, adaptation: Adaptation, last: bool) -> bool:
        """True if the hard activation is in place."""
        return type(model.get_submodule(name)) is _hard(adaptation.replaces)

    def change(self, model: nn.Module, adaptation: Adaptation) -> None:
        """Replace the activations by hard ones."""
        exchange(model, adaptation.modules, _hard(adaptation.replaces))

    def convert(self, state: dict[str, Tensor], adaptation: Adaptation) -> tuple[Unchanged, ...]:
        """Activations have no parameters, so nothing changes."""
        return ()


def _multiplier(model: nn.Module, name: str) -> str:
    """The module whose forward multiplies by a sigmoid: the nearest around it that is no nn.Sequential."""
    owner = name
    while owner:
        owner = owner.rpartition(".")[0]
        if not isinstance(model.get_submodule(owner), nn.Sequential):
            return owner or name
    return name


def _has_swish(module: nn.Module, swishes: set[int]) -> bool:
    """True if a module contains the sigmoid of a SwishNorm, which is reported under the module's name."""
    return any(id(child) in swishes for child in module.modules())


def _hard(replaces: str) -> type[nn.Hardswish] | type[nn.Hardsigmoid]:
    return nn.Hardswish if replaces.endswith(".SiLU") else nn.Hardsigmoid


MOD: ModuleMod = HardSwishMod()
