"""Changes of mods as data: plans contain them, and generated code has adaptations as literals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

Setting = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Adaptation:
    """Modules that one mod changes in the same way."""

    mod: str  # its name in `loka.mods.registry`: "block_norm"
    modules: tuple[str, ...]  # qualified names, in model order
    replaces: str  # their type before: "torch.nn.modules.normalization.LayerNorm"
    settings: tuple[tuple[str, Setting], ...] = ()  # parameters of the change: (("block", 256), ("eps", 1e-05))


@dataclass(frozen=True, slots=True)
class RewriteResult:
    """One change that a mod made in a module's forward; the function stays the same."""

    mod: str  # its name in policies: "merge_siblings"
    owner: str  # qualified name of the module whose forward was rewritten; "" is the model
    sites: tuple[str, ...]  # the sites it changed, by their names without the mod
    site: str  # the site that they are now: "layers.0.q+k"
    what: str  # description: "2 linears over x are one GEMM of K 512, N 1024"


@dataclass(frozen=True, slots=True)
class Unchanged:
    """A module, Parameter or site that a mod was asked for and does not change, with the reason."""

    name: str  # qualified name of a module, Parameter or site
    reason: str


@runtime_checkable
class ModelMod(Protocol):
    """A mod that changes modules, by the adaptations that its planning found."""

    @property
    def exact(self) -> bool:
        """True if the function stays the same, up to rounding; otherwise the model has to be retrained."""
        ...

    def unsupported_reason(self, model: nn.Module, name: str, adaptation: Adaptation) -> str | None:
        """Reason why a module of an adaptation cannot be changed: it is not the planned one. None where it can."""
        ...

    def is_done(self, model: nn.Module, name: str, adaptation: Adaptation, last: bool) -> bool:
        """True if a module of an adaptation has been changed; `last`: and no later adaptation changed it again."""
        ...

    def change(self, model: nn.Module, adaptation: Adaptation) -> None:
        """Change the modules of an adaptation in place. The caller has checked that they are the planned ones."""
        ...

    def convert(self, state: dict[str, Tensor], adaptation: Adaptation) -> tuple[Unchanged, ...]:
        """Convert a state_dict of the original model to the adapted one's, in place.

        Returns what is lost, each with its reason; it is removed in any case.
        """
        ...
