"""Interactions that kernels of their own compute: where to look for them, which were chosen, why others stay."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from loka.graph.ir import ConcatNorm, Cross, FmInteraction, Region
from loka.kernels.measurements.interaction_forms import Form
from loka.sites.site import Site


@dataclass(frozen=True, slots=True)
class Interacting:
    """Where a model may have interactions that a mod was asked for, as far as the model's sites show it."""

    owners: frozenset[str] = frozenset()  # the modules whose forward may write one
    sites: tuple[Site, ...] = ()  # GEMMs that have to be seen as such in these forwards
    together: tuple[tuple[str, str], ...] = ()  # (site of a cross layer, the smallest module that holds them all)
    crossing: frozenset[str] = frozenset()  # names of the sites whose products a cross layer may read


@dataclass(frozen=True, slots=True)
class Reserved:
    """Sites that a mod takes into kernels of its own, and that no other mod may write otherwise; all by name."""

    mod: str = ""  # as a policy writes it
    sites: frozenset[str] = frozenset()  # their calls stay as they are written
    products: frozenset[str] = frozenset()  # what they multiply to is read as it is: their N stays


@dataclass(frozen=True, slots=True)
class Fused:
    """One interaction that a kernel computes."""

    owner: str  # the module whose forward writes it
    what: str  # for people: "a mixing layer of 64 embeddings of 128, rank 32, 32 weighted sums"
    sites: tuple[str, ...] = ()  # that it takes along
    form: Form | None = None  # None where the chain of its GEMMs computes it
    columns: int = 0  # of an embedding, or of a row
    beside: str = ""  # a site that is called as often, "" where its forward has none


@dataclass(slots=True)
class FusedInteractions:
    """What came of looking for interactions in the modules that the mod was asked for."""

    fused: list[Fused] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)  # owner -> why something of it, or all, stays

    def refuse(self, owners: Iterable[str], reason: str) -> None:
        """Nothing of these owners is fused."""
        for owner in owners:
            self.reasons.setdefault(owner, reason)

    def close(self, owners: Collection[str], reason: str) -> None:
        """Owners that nothing was found in, and nothing was said of, get a general reason."""
        found = {fused.owner for fused in self.fused}
        self.refuse(sorted(owner for owner in owners if owner not in found), reason)


@dataclass(frozen=True, slots=True)
class ChosenInteractions:
    """The interactions of one forward that kernels take; the sites that they take along, each with the operations."""

    mixes: tuple[FmInteraction, ...] = ()
    joins: tuple[ConcatNorm, ...] = ()
    crosses: tuple[Cross, ...] = ()
    regions: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return bool(self.mixes or self.joins or self.crosses)

    def crosses_in(self, region: Region) -> bool:
        """Whether a region around a GEMM holds a part of a cross layer, which is then computed on its own."""
        return any(region.first <= place <= region.last for cross in self.crosses for place in cross.places)
