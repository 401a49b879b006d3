"""The modules whose forwards a mod rewrites as a whole, and what comes of one."""

from __future__ import annotations

from dataclasses import dataclass

from loka.graph.ir import ForwardIR


@dataclass(frozen=True, slots=True)
class OwnerScope:
    """A module whose forward a mod is to rewrite; all names are qualified."""

    mod: str  # as a policy writes it
    owner: str
    writers: tuple[str, ...]  # the modules, itself among them, whose forwards may write what is rewritten
    inline: tuple[str, ...]  # what is to be printed into its forward


@dataclass(frozen=True, slots=True)
class RewrittenOwner:
    """A forward that a mod has rewritten, and which statements of the forward before that it rewrote, by the local."""

    forward: ForwardIR
    targets: tuple[str, ...]


def is_under(name: str, owner: str) -> bool:
    """Whether a module is another one or lies in it."""
    return name == owner or not owner or name.startswith(f"{owner}.")


def writer_of(forward: ForwardIR, place: int) -> str:
    """The module whose forward the statement at a place was written in."""
    return ".".join(filter(None, (forward.owner, forward.statements[place].note)))
