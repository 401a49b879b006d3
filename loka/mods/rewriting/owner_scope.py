"""The modules whose forwards a mod rewrites as a whole, and the results."""

from __future__ import annotations

from dataclasses import dataclass

from loka.graph.ir import ForwardIR


@dataclass(frozen=True, slots=True)
class OwnerScope:
    """A module whose forward a mod is to rewrite; all names are qualified."""

    mod: str  # its name in policies
    owner: str
    writers: tuple[str, ...]  # the modules, including the owner, whose forwards may contain statements to rewrite
    inline: tuple[str, ...]  # modules to inline into its forward


@dataclass(frozen=True, slots=True)
class RewrittenOwner:
    """A forward that a mod has rewritten, and the targets of the original statements that it rewrote."""

    forward: ForwardIR
    targets: tuple[str, ...]


def is_under(name: str, owner: str) -> bool:
    """True if a module is the owner or inside it."""
    return name == owner or not owner or name.startswith(f"{owner}.")


def writer_of(forward: ForwardIR, place: int) -> str:
    """The module whose forward a statement comes from."""
    return ".".join(filter(None, (forward.owner, forward.statements[place].note)))
