"""What carries out a mod that changes modules: on a live model, and on checkpoints. Needs torch alone."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from loka.mods.adaptation import Adaptation, Unchanged


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
