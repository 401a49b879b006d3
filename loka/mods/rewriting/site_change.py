"""A change that a mod makes to calls of sites in a forward, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

from loka.graph.ir import ForwardIR


class SiteChange(Protocol):
    """One change, hashable; sites have their names in the forward, and a forward is rewritten once for each change."""

    @property
    def mod(self) -> str:
        """Name of the mod in policies."""
        ...

    @property
    def reads(self) -> tuple[str, ...]:
        """The sites whose calls it changes."""
        ...

    @property
    def makes(self) -> str:
        """The site that replaces them; one of `reads` if that stays."""
        ...

    def under(self, rename: Callable[[str], str]) -> Self:
        """The same with its sites renamed."""
        ...

    def rewritten(self, forward: ForwardIR) -> ForwardIR:
        """The forward with the change applied. Raises LokaError where the calls are not the expected ones."""
        ...


@dataclass(frozen=True, slots=True)
class OwnedChange:
    """One change that a mod makes in the forward of one module."""

    owner: str  # qualified name
    change: SiteChange  # its sites are named relative to the owner
    linear: bool = False  # the owner is the nn.Linear itself, and the site is its "weight"

    def seen_from(self, owner: str) -> SiteChange:
        """The change with names relative to its owner or a module around it."""
        path = relative(self.owner, owner) if self.owner != owner else ""
        if not path:
            return self.change
        return self.change.under(lambda name: path if self.linear else f"{path}.{name}")


def relative(name: str, owner: str) -> str:
    """A qualified name relative to a module."""
    return name.removeprefix(f"{owner}.") if owner else name
