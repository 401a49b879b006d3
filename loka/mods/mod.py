"""What every mod says of itself, and what it is asked and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from loka.mods.adaptation import Adaptation, Setting, Unchanged

State = Mapping[str, Tensor]  # a state_dict


@dataclass(frozen=True, slots=True)
class ModRequest:
    """What one entry of a policy's `mods` asks for."""

    wants: Callable[[str], bool]  # whether a qualified name is matched, and not excepted
    names: Callable[[str], bool]  # whether a pattern without a wildcard names it: then being unable is an error
    settings: Mapping[str, Setting]  # the mod's own parameters, all of them


@dataclass(frozen=True, slots=True)
class WrittenFields:
    """A norm, an activation or a linear that a forward calls as a function: there is no module to exchange."""

    op: str  # "silu", "sigmoid" (of x * sigmoid(norm(x))), "layer_norm", "rms_norm", "linear"
    owner: str  # qualified name of the module in whose forward it stands
    place: str  # "models.py:44 'y = F.silu(x)'", "" where it is unknown


PLACES = 5  # of one function in one forward, that one reason tells


@dataclass(frozen=True, slots=True)
class Adaptable:
    """A model to adapt. It may lie on the meta device; only its structure is looked at.

    All but `module` was seen while a copy ran on example inputs (`analyse_dataflow`). Names stay true while
    mods change modules of the model, so that one mod can look for work in what another left.
    """

    module: nn.Module
    final: frozenset[str]  # linears whose product reaches an output with no other product after it
    into: Mapping[str, str]  # linear -> the one linear that alone reads its product, with nothing in between
    called: frozenset[str] = frozenset()  # modules whose forward ran
    read: Mapping[str, str] = field(default_factory=dict)  # Parameter -> what else reads it than its own linear: "mul"
    swishes: frozenset[str] = frozenset()  # nn.Sigmoids whose product only multiplies what they, or their norm, read
    written: tuple[WrittenFields, ...] = ()

    def calls(self, asked: ModRequest, *ops: str) -> Iterator[tuple[str, str, str]]:
        """The functions of `ops` that the forwards asked for call, each forward and function once.

        As function, owner and where: ("silu", "body", " at models.py:44, models.py:57"); where is "" if unknown.
        """
        places: dict[tuple[str, str], list[str]] = {}
        for each in self.written:
            if each.op in ops and asked.wants(each.owner):
                places.setdefault((each.op, each.owner), []).extend([each.place] if each.place else [])
        for (op, owner), found in places.items():
            yield op, owner, f" at {_listed(found)}" if found else ""


def _listed(places: Sequence[str]) -> str:
    """One place with its text, several without."""
    if len(places) == 1:
        return places[0]
    lines = list(dict.fromkeys(place.partition(" '")[0] for place in places))
    return ", ".join(lines[:PLACES]) + (f" and {len(lines) - PLACES} more" if len(lines) > PLACES else "")


@dataclass(frozen=True, slots=True)
class ModMatch:
    """What a mod would change in a model, and what it was asked for and cannot."""

    adaptations: tuple[Adaptation, ...] = ()
    unchanged: tuple[Unchanged, ...] = ()
    named: tuple[str, ...] = ()  # what patterns choose the adapted modules by; () where that is their own names


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

    def find(self, model: Adaptable, asked: ModRequest) -> ModMatch:
        """What it would change in the model as it is now, earlier mods having been carried out. Changes nothing."""
        ...

    def unsupported_reason(self, model: nn.Module, name: str, adaptation: Adaptation) -> str | None:
        """Why a module of an adaptation cannot be changed: it is not what `find` saw. None where it can."""
        ...

    def is_done(self, model: nn.Module, name: str, adaptation: Adaptation, last: bool) -> bool:
        """Whether a module of an adaptation has been changed; `last`: and no later adaptation changed it again."""
        ...

    def change(self, model: nn.Module, adaptation: Adaptation) -> None:
        """Change the modules of an adaptation, in place. Whoever calls has checked that they are what `find` saw."""
        ...

    def convert(self, state: dict[str, Tensor], adaptation: Adaptation) -> tuple[Unchanged, ...]:
        """Take a state_dict of the model as it was to the adapted one's, in place.

        Returns what would be lost by that, each with its reason; what is lost is taken out all the same.
        """
        ...
