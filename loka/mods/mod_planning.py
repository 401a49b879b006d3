"""What planning asks of mods, and what they answer: a protocol for each kind of mod (`loka.mods.registry.ModKind`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from torch import nn

from loka.graph.ir import ForwardIR
from loka.graph.patterns.linear_chain import LinearChain
from loka.mods.adaptation import Adaptation, Setting, Unchanged
from loka.mods.dataflow import Adaptable
from loka.mods.rewriting.interactions import ChosenInteractions, FusedInteractions, Interacting, Reserved
from loka.mods.rewriting.model_in_change import ModelInChange
from loka.mods.rewriting.owner_scope import OwnerScope, RewrittenOwner
from loka.mods.rewriting.site_outcome import SiteOutcome
from loka.policy.policy import ModRule
from loka.policy.schema.mod_schema import ModFields
from loka.sites.site import Site


@dataclass(frozen=True, slots=True)
class ModRequest:
    """What one entry of a policy's `mods` asks for."""

    wants: Callable[[str], bool]  # whether a qualified name is matched, and not excepted
    names: Callable[[str], bool]  # whether a pattern without a wildcard names it: then being unable is an error
    settings: Mapping[str, Setting]  # the mod's own parameters, all of them


@dataclass(frozen=True, slots=True)
class ModMatch:
    """What a mod would change in a model, and what it was asked for and cannot."""

    adaptations: tuple[Adaptation, ...] = ()
    unchanged: tuple[Unchanged, ...] = ()
    named: tuple[str, ...] = ()  # what patterns choose the adapted modules by; () where that is their own names


class Concern(StrEnum):
    """What may be wrong about a site, and a mod could mend."""

    BIAS = "bias"  # of the site itself
    NORM_AFTER = "norm_after"  # that reads its product
    NORM_BEFORE = "norm_before"  # that makes its input
    ACTIVATION_BEFORE = "activation_before"  # that makes its input
    INPUT_SIZES = "input_sizes"  # features of its input are of unlike sizes


@dataclass(frozen=True, slots=True)
class SiteNeighbours:
    """A site, and the modules of the nearest functions before and after it, by operation: {"layer_norm": "norm"}."""

    site: str
    before: Mapping[str, str]
    after: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class UnplannedModel:
    """A model that no policy describes yet: what a mod looks at to be proposed for it."""

    module: nn.Module
    sites: tuple[Site, ...]
    siblings: tuple[tuple[str, ...], ...] = ()  # names of sites that seem to read one tensor


@runtime_checkable
class ModPlanning(Protocol):
    """What every mod says."""

    @property
    def name(self) -> str:
        """As a policy writes it."""
        ...

    @property
    def exact(self) -> bool:
        """Whether the function stays the same, up to rounding; else the model has to be trained anew."""
        ...

    @property
    def description(self) -> str:
        """What it changes and what that is good for, in one line of `loka plan`."""
        ...

    @property
    def setting(self) -> type[ModFields]:
        """What a policy may write: `use`, and the mod's own parameters, each with a default."""
        ...


@runtime_checkable
class ModuleModPlanning(ModPlanning, Protocol):
    """A mod that changes modules: what comes out is another model, in the model's own code."""

    @property
    def opt_in(self) -> bool:
        """Whether `loka init` leaves it out: it is for what a profile tells."""
        ...

    @property
    def of_paper(self) -> bool:
        """Whether it is one of those of LoKA (arXiv 2605.10886), "Mods", which benchmarks measure."""
        ...

    def find(self, model: Adaptable, request: ModRequest) -> ModMatch:
        """What it would change in the model as it is now, earlier mods having been carried out. Changes nothing."""
        ...

    def describe(self, adaptation: Adaptation, count: int) -> str:
        """What becomes of each of `count` modules that are changed alike: "LayerNorm -> BlockNorm 256"."""
        ...

    def suggest(self, match: ModMatch, site: SiteNeighbours) -> Iterator[tuple[Concern, str]]:
        """What a policy could write in `match` against concerns about a site; `match` is all that the mod can take."""
        ...


@runtime_checkable
class ForwardModPlanning(ModPlanning, Protocol):
    """A mod that rewrites forwards: the function stays the same."""

    def proposal(self, model: UnplannedModel) -> str | None:
        """What it may change in a model, for `loka init`: "6 sites read 3 tensors"; None where nothing."""
        ...


@runtime_checkable
class SiteModPlanning(ForwardModPlanning, Protocol):
    """A mod that rewrites calls of sites in the forwards of their owners."""

    def rewrite_sites(self, model: ModelInChange, rule: ModRule) -> SiteOutcome:
        """Carry out one entry, change by change; a change that is not the same function is never made."""
        ...


@runtime_checkable
class OwnerModPlanning(ForwardModPlanning, Protocol):
    """A mod that rewrites the statements of owners, once mods have rewritten the calls of sites in them."""

    @property
    def nothing(self) -> str:
        """Why a forward stays as it is where there is nothing to rewrite in it."""
        ...

    def scopes(self, model: nn.Module, wants: Callable[[str], bool]) -> tuple[OwnerScope, ...]:
        """The modules whose forwards are to be traced, among those that are wanted. Only the structure is read."""
        ...

    def inner(self, scope: OwnerScope, model: nn.Module) -> tuple[OwnerScope, ...]:
        """The scopes below one whose own forward cannot be traced."""
        ...

    def rewrite(
        self, forward: ForwardIR, means: Callable[[str], bool], settings: Mapping[str, Setting]
    ) -> RewrittenOwner | str:
        """The forward rewritten, or why not; `means` says of a module whether what its forward writes is meant."""
        ...

    def describe(self, count: int, settings: Mapping[str, Setting]) -> str:
        """So many of the statements that it rewrites: "9 residual sums in float32"."""
        ...


@runtime_checkable
class InteractionModPlanning(ForwardModPlanning, Protocol):
    """A mod that has interactions computed by kernels of their own."""

    @property
    def nothing(self) -> str:
        """Why a forward stays as it is where it has no interaction."""
        ...

    def interacting(self, sites: Sequence[Site], model: nn.Module, wants: Callable[[str], bool]) -> Interacting:
        """Where a model may have interactions, in the modules that are wanted. Only the structure is read."""
        ...

    def reserved(self, interacting: Interacting, sites: Sequence[Site]) -> Reserved:
        """The sites that no other mod may write otherwise."""
        ...

    def choose(
        self,
        forward: ForwardIR,
        owners: Collection[str],
        kept: Collection[str],
        chains: Sequence[LinearChain],
        found: FusedInteractions,
    ) -> ChosenInteractions:
        """The interactions that these owners write and that kernels take; `found` gets these, and why others stay.

        `kept` names sites whose GEMMs stay in the model's dtype; a chain computes what stands in it.
        """
        ...
