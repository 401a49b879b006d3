"""A change that a mod makes to calls of sites in a forward, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from loka.graph.ir import ForwardIR


class SiteChange(Protocol):
    """One change, hashable; sites are named as in the forward, and a forward is rewritten once for each."""

    @property
    def mod(self) -> str:
        """As a policy writes it."""
        ...

    @property
    def reads(self) -> tuple[str, ...]:
        """The sites whose calls it changes."""
        ...

    @property
    def makes(self) -> str:
        """The site that they are then; one of `reads` where it stays that."""
        ...

    def under(self, rename: Callable[[str], str]) -> Self:
        """The same with its sites under other names."""
        ...

    def rewritten(self, forward: ForwardIR) -> ForwardIR:
        """The forward with the change carried out. Raises LokaError where the calls are not those that were found."""
        ...


@dataclass(frozen=True, slots=True)
class OwnedChange:
    """One change that a mod makes in the forward of one module."""

    owner: str  # qualified name
    change: SiteChange  # its sites are named as the owner calls them
    linear: bool = False  # the owner is the nn.Linear itself, and the site is its "weight"

    def seen_from(self, owner: str) -> SiteChange:
        """The change as it is called in the forward of a module around its owner, or of its owner."""
        path = relative(self.owner, owner) if self.owner != owner else ""
        if not path:
            return self.change
        return self.change.under(lambda name: path if self.linear else f"{path}.{name}")


def relative(name: str, owner: str) -> str:
    """What a module calls what lies in it."""
    return name.removeprefix(f"{owner}.") if owner else name
