"""Interactions with their own kernels: where to look for them, which were chosen, and reasons for others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from loka.graph.ir import ConcatNorm, Cross, FmInteraction, Region
from loka.kernels.measurements.interaction_forms import Form
from loka.sites.site import Site


@dataclass(frozen=True, slots=True)
class Interacting:
    """Where a model may have interactions that a mod was asked for, as far as the model's sites show."""

    owners: frozenset[str] = frozenset()  # modules whose forward may contain one
    sites: tuple[Site, ...] = ()  # GEMMs that must be recognised as such in these forwards
    together: tuple[tuple[str, str], ...] = ()  # (site, the smallest module that holds all that belong together)
    crossing: frozenset[str] = frozenset()  # names of sites whose products a cross layer may read
    mixing: frozenset[str] = frozenset()  # names of sites that may be multiplied by in a mixing layer
    products: tuple[tuple[str, str], ...] = ()  # (module of an interaction's product, the module that holds all of it)
    likely: frozenset[str] = frozenset()  # of `owners`, those where what is around the sites is as in an interaction
    unwanted: frozenset[str] = frozenset()  # modules that the mod was not asked for


@dataclass(frozen=True, slots=True)
class Reserved:
    """Sites that a mod fuses into its own kernels, and that no other mod may rewrite; all by name."""

    mod: str = ""  # its name in policies
    sites: frozenset[str] = frozenset()  # their calls must not change
    products: frozenset[str] = frozenset()  # their products are read directly: their N must not change


@dataclass(frozen=True, slots=True)
class Fused:
    """One interaction that a kernel computes."""

    owner: str  # the module whose forward contains it
    what: str  # description: "a mixing layer of 64 embeddings of 128, rank 32, 32 weighted sums"
    sites: tuple[str, ...] = ()  # sites fused with it
    form: Form | None = None  # None if the chain of its GEMMs computes it
    columns: int = 0  # of an embedding, or of a row
    beside: str = ""  # a site that is called as often; "" if its forward has none


@dataclass(slots=True)
class FusedInteractions:
    """The interactions found in the modules that the mod was asked for."""

    fused: list[Fused] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)  # owner -> reason why some or all of it is not fused
    untraced: dict[str, str] = field(default_factory=dict)  # the same for owners without a sign of an interaction

    def refuse(self, owners: Iterable[str], reason: str) -> None:
        """Record that nothing of these owners is fused."""
        for owner in owners:
            self.reasons.setdefault(owner, reason)


@dataclass(frozen=True, slots=True)
class ChosenInteractions:
    """The interactions of one forward that kernels support, and the sites fused with them, each with the operations."""

    mixes: tuple[FmInteraction, ...] = ()
    joins: tuple[ConcatNorm, ...] = ()
    crosses: tuple[Cross, ...] = ()
    regions: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def any(self) -> bool:
        """True if there is one."""
        return bool(self.mixes or self.joins or self.crosses)

    def crosses_in(self, region: Region) -> bool:
        """True if a region around a GEMM contains part of a cross layer, which is then computed separately."""
        return any(region.first <= place <= region.last for cross in self.crosses for place in cross.places)
