"""What mods change, as data: a plan holds it, and generated code has adaptations as literals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

Setting = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Adaptation:
    """Modules that one mod changes in one way."""

    mod: str  # its name in `loka.mods.registry`: "block_norm"
    modules: tuple[str, ...]  # qualified names, in model order
    replaces: str  # their type before: "torch.nn.modules.normalization.LayerNorm"
    settings: tuple[tuple[str, Setting], ...] = ()  # what the change needs: (("block", 256), ("eps", 1e-05))


@dataclass(frozen=True, slots=True)
class RewriteResult:
    """One change that a mod made in the forward of one module. The function stays the same."""

    mod: str  # as a policy writes it: "merge_siblings"
    owner: str  # qualified name of the module whose forward was rewritten; "" is the model
    sites: tuple[str, ...]  # those that took part, as they are called without the mod
    site: str  # what they are now: "layers.0.q+k"
    what: str  # for people: "2 linears over x are one GEMM of K 512, N 1024"


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Something that a mod was asked for and leaves as it is, and why."""

    name: str  # qualified name of a module, Parameter or site
    reason: str


@runtime_checkable
class ModelMod(Protocol):
    """A mod that changes modules, by the adaptations that its planning found."""

    @property
    def exact(self) -> bool:
        """Whether the function stays the same, up to rounding; else the model has to be trained anew."""
        ...

    def unsupported_reason(self, model: nn.Module, name: str, adaptation: Adaptation) -> str | None:
        """Why a module of an adaptation cannot be changed: it is not what was planned for. None where it can."""
        ...

    def is_done(self, model: nn.Module, name: str, adaptation: Adaptation, last: bool) -> bool:
        """Whether a module of an adaptation has been changed; `last`: and no later adaptation changed it again."""
        ...

    def change(self, model: nn.Module, adaptation: Adaptation) -> None:
        """Change the modules of an adaptation, in place. Whoever calls has checked that they are what was planned."""
        ...

    def convert(self, state: dict[str, Tensor], adaptation: Adaptation) -> tuple[Unchanged, ...]:
        """Take a state_dict of the model as it was to the adapted one's, in place.

        Returns what would be lost by that, each with its reason; what is lost is taken out all the same.
        """
        ...
