"""What every mod says of itself, and what it is asked and answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from loka.mods.adaptation import Adaptation, Setting, Unchanged

State = Mapping[str, Tensor]  # a state_dict


@dataclass(frozen=True, slots=True)
class Asked:
    """What one entry of a policy's `mods` asks for."""

    wants: Callable[[str], bool]  # whether a qualified name is matched, and not excepted
    names: Callable[[str], bool]  # whether a pattern without a wildcard names it: then being unable is an error
    settings: Mapping[str, Setting]  # the mod's own parameters, all of them


@dataclass(frozen=True, slots=True)
class Adaptable:
    """A model to adapt. It may lie on the meta device; only its structure is looked at."""

    module: nn.Module
    final: frozenset[str]  # linears whose product reaches an output with no other product after it
    into: Mapping[str, str]  # linear -> the one linear that alone reads its product, with nothing in between


@dataclass(frozen=True, slots=True)
class Found:
    """What a mod would change in a model, and what it was asked for and cannot."""

    adaptations: tuple[Adaptation, ...] = ()
    unchanged: tuple[Unchanged, ...] = ()


class ModelMod(Protocol):
    """A mod that changes modules: what comes out is another model, in the model's own code."""

    @property
    def name(self) -> str:
        """As a policy writes it."""
        ...

    @property
    def exact(self) -> bool:
        """Whether the function stays the same, up to rounding; else the model has to be trained anew."""
        ...

    @property
    def promise(self) -> str:
        """What it changes and what that is good for, in one line of `loka plan`."""
        ...

    def find(self, model: Adaptable, asked: Asked) -> Found:
        """What it would change. Changes nothing."""
        ...

    def change(self, model: nn.Module, adaptation: Adaptation) -> None:
        """Change the modules of an adaptation, in place. Whoever calls has checked that they are what `find` saw."""
        ...

    def convert(self, state: dict[str, Tensor], adaptation: Adaptation) -> tuple[Unchanged, ...]:
        """Take a state_dict of the model as it was to the adapted one's, in place.

        Returns what would be lost by that, each with its reason; what is lost is taken out all the same.
        """
        ...
