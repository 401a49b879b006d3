"""Hard Swish: SiLU and SwishNorm without exponentials."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from loka.mods.adaptation import Adaptation, Setting, Unchanged
from loka.mods.mod import Adaptable, ModMatch, ModRequest
from loka.mods.structure import (
    every_name,
    exchange,
    grouped,
    held_elsewhere,
    short,
    type_of,
    unsupported_exchange,
    why_another,
)


@dataclass(frozen=True, slots=True)
class HardSwishMod:
    """x * ReLU6(x + 3) / 6 in place of x * sigmoid(x); in SwishNorm, x * sigmoid(norm(x)), the sigmoid becomes hard.

    nn.SiLU becomes nn.Hardswish, not in place. An nn.Sigmoid whose product does nothing but multiply what it takes,
    or what its norm takes, becomes nn.Hardsigmoid: that of torchrec's SwishLayerNorm, and of any module of that form.
    Patterns name the SiLU, or the module whose forward has the product.

    Not exact, a new model: up to 0.142 off, at 3 and -3. No exponential, so that it costs little in the
    epilogue of a GEMM, and exactly zero or x outside of [-3, 3] (LoKA, "Mods": Hard Swish).

    Quality: NE differed by -0.02 +- 0.02 % on MovieTweetings (small Wukong, one epoch, four seeds).

    Checkpoints: they have no parameters, so that nothing changes.
    """

    name: str = "hard_swish"
    exact: bool = False
    promise: str = "Swish without exponentials: it fuses with the norm before it, and its range is known"

    def find(self, model: Adaptable, asked: ModRequest) -> ModMatch:
        """The activations to exchange."""
        names, held = every_name(model.module), held_elsewhere(model.module)
        swishes = {id(model.module.get_submodule(name)) for name in model.swishes}
        found: list[tuple[str, str, tuple[tuple[str, Setting], ...]]] = []
        unchanged: list[Unchanged] = []
        named: list[str] = []
        for name, module in model.module.named_modules(remove_duplicate=False):
            swish = id(module) in swishes
            told = _multiplier(model.module, name) if swish else name
            if not asked.wants(told):
                continue
            reason = unsupported_exchange(module, held)
            every = [_multiplier(model.module, other) if swish else other for other in names[id(module)]]
            others = [other for other in every if not asked.wants(other)]
            if not swish and type(module) is not nn.SiLU:
                if isinstance(module, nn.SiLU) or (asked.names(name) and not _has_swish(module, swishes)):
                    unchanged.append(Unchanged(name, f"it is a {short(module)}, neither an nn.SiLU nor a SwishNorm"))
            elif reason is not None or others or not name:
                shared = (
                    f"it is '{others[0]}' too, which the mod does not match" if others else "it is the model itself"
                )
                unchanged.append(Unchanged(told, reason or shared))
            else:
                named.append(told)
                found.append((name, type_of(module), ()))
        for op, owner, where in model.calls(asked, "silu", "sigmoid"):
            what = "calls F.silu" if op == "silu" else "multiplies by a sigmoid of what it multiplies"
            unchanged.append(Unchanged(owner, f"it {what}{where}: write an nn module for it"))
        return ModMatch(grouped(self.name, found), tuple(unchanged), tuple(named))

    def unsupported_reason(self, model: nn.Module, name: str, adaptation: Adaptation) -> str | None:
        """Why the activation is not the one that was found."""
        return why_another(model.get_submodule(name), adaptation.replaces)

    def is_done(self, model: nn.Module, name: str, adaptation: Adaptation, last: bool) -> bool:
        """Whether the hard one is there."""
        return type(model.get_submodule(name)) is _hard(adaptation.replaces)

    def change(self, model: nn.Module, adaptation: Adaptation) -> None:
        """Put the hard ones in their places."""
        old = {name: model.get_submodule(name) for name in adaptation.modules}
        made = {id(module): _hard(adaptation.replaces)() for module in old.values()}
        exchange(model, {name: made[id(module)] for name, module in old.items()})

    def convert(self, state: dict[str, Tensor], adaptation: Adaptation) -> tuple[Unchanged, ...]:
        """Nothing to do: activations have no parameters."""
        return ()


def _hard(replaces: str) -> type[nn.Hardswish] | type[nn.Hardsigmoid]:
    return nn.Hardswish if replaces.endswith(".SiLU") else nn.Hardsigmoid


def _multiplier(model: nn.Module, name: str) -> str:
    """The module whose forward multiplies by a sigmoid: the nearest around it that is no nn.Sequential."""
    owner = name
    while owner:
        owner = owner.rpartition(".")[0]
        if not isinstance(model.get_submodule(owner), nn.Sequential):
            return owner or name
    return name


def _has_swish(module: nn.Module, swishes: set[int]) -> bool:
    """Whether a module holds the sigmoid of a SwishNorm, which is told under its name."""
    return any(id(child) in swishes for child in module.modules())
