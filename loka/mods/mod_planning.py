"""Protocols of mods in planning, one for each kind of mod (`loka.mods.registry.ModKind`), and their values."""

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
from loka.mods.rewriting.rewriting_tracer import OwnerScope, RewrittenOwner
from loka.mods.rewriting.site_outcome import SiteOutcome
from loka.policy.mod_schema import ModFields
from loka.policy.policy import ModRule
from loka.sites.flow import Flow
from loka.sites.site import Site


@dataclass(frozen=True, slots=True)
class ModRequest:
    """The request of one entry of a policy's `mods`."""

    wants: Callable[[str], bool]  # True if a qualified name is matched and not excepted
    names: Callable[[str], bool]  # True if a pattern without a wildcard names it: then a failure is an error
    settings: Mapping[str, Setting]  # values of all of the mod's parameters


@dataclass(frozen=True, slots=True)
class ModMatch:
    """Changes that a mod would make in a model, and requested ones that it cannot make."""

    adaptations: tuple[Adaptation, ...] = ()
    unchanged: tuple[Unchanged, ...] = ()
    named: tuple[str, ...] = ()  # names of the adapted modules for patterns; () if these are their own names


class Concern(StrEnum):
    """A problem of a site that a mod could solve."""

    BIAS = "bias"  # the site's own bias
    NORM_AFTER = "norm_after"  # a norm that reads its product
    NORM_BEFORE = "norm_before"  # a norm that makes its input
    ACTIVATION_BEFORE = "activation_before"  # an activation that makes its input
    INPUT_SIZES = "input_sizes"  # its input features differ in magnitude


@dataclass(frozen=True, slots=True)
class SiteNeighbours:
    """A site, and the modules of the nearest functions before and after it, by operation: {"layer_norm": "norm"}."""

    site: str
    before: Mapping[str, str]
    after: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class UnplannedModel:
    """A model without a policy, for which mods can be proposed."""

    module: nn.Module
    sites: tuple[Site, ...]
    siblings: tuple[tuple[str, ...], ...] = ()  # names of sites that seem to read one tensor


@runtime_checkable
class ModPlanning(Protocol):
    """Properties of every mod."""

    @property
    def name(self) -> str:
        """Name of the mod in policies."""
        ...

    @property
    def exact(self) -> bool:
        """True if the function stays the same, up to rounding; otherwise the model has to be retrained."""
        ...

    @property
    def description(self) -> str:
        """The change and its benefit, in one line of `loka plan`."""
        ...

    @property
    def setting(self) -> type[ModFields]:
        """Schema of a policy's entry: `use`, and the mod's own parameters, each with a default."""
        ...


@runtime_checkable
class ModuleModPlanning(ModPlanning, Protocol):
    """A mod that changes modules: the result is another model, in the model's own code."""

    @property
    def opt_in(self) -> bool:
        """True if `loka init` leaves it out, as it needs a profile."""
        ...

    @property
    def of_paper(self) -> bool:
        """True for the mods of LoKA (arXiv 2605.10886), "Mods", which benchmarks measure."""
        ...

    def find(self, model: Adaptable, request: ModRequest) -> ModMatch:
        """Changes that it would make in the current model, after earlier mods. Changes nothing."""
        ...

    def describe(self, adaptation: Adaptation, count: int) -> str:
        """Description of the change of `count` modules: "LayerNorm -> BlockNorm 256"."""
        ...

    def suggest(self, match: ModMatch, site: SiteNeighbours) -> Iterator[tuple[Concern, str]]:
        """Concerns about a site and an entry of `match` against each; `match` is all that the mod can change."""
        ...


@runtime_checkable
class ForwardModPlanning(ModPlanning, Protocol):
    """A mod that rewrites forwards: the function stays the same."""

    def proposal(self, model: UnplannedModel) -> str | None:
        """Possible changes in a model, for `loka init`: "6 sites read 3 tensors"; None for none."""
        ...


@runtime_checkable
class SiteModPlanning(ForwardModPlanning, Protocol):
    """A mod that rewrites calls of sites in the forwards of their owners."""

    def rewrite_sites(self, model: ModelInChange, rule: ModRule) -> SiteOutcome:
        """Apply one entry, change by change; a change that would not keep the function is never made."""
        ...


@runtime_checkable
class OwnerModPlanning(ForwardModPlanning, Protocol):
    """A mod that rewrites the statements of owners, after mods have rewritten the calls of sites in them."""

    @property
    def nothing(self) -> str:
        """Reason for a forward without anything to rewrite."""
        ...

    def scopes(self, model: nn.Module, wants: Callable[[str], bool]) -> tuple[OwnerScope, ...]:
        """The wanted modules whose forwards are to be traced. Only the structure is read."""
        ...

    def inner(self, scope: OwnerScope, model: nn.Module) -> tuple[OwnerScope, ...]:
        """The scopes below one whose own forward cannot be traced."""
        ...

    def rewrite(
        self, forward: ForwardIR, means: Callable[[str], bool], settings: Mapping[str, Setting]
    ) -> RewrittenOwner | str:
        """The rewritten forward, or the reason why not; `means` is true for modules whose statements are meant."""
        ...

    def describe(self, count: int, settings: Mapping[str, Setting]) -> str:
        """Description of `count` rewritten statements: "9 residual sums in float32"."""
        ...


@runtime_checkable
class InteractionModPlanning(ForwardModPlanning, Protocol):
    """A mod that computes interactions in their own kernels."""

    @property
    def nothing(self) -> str:
        """Reason for a forward without an interaction."""
        ...

    def interacting(
        self, sites: Sequence[Site], model: nn.Module, wants: Callable[[str], bool], flow: Flow
    ) -> Interacting:
        """Where the wanted modules may have interactions. Only the structure is read."""
        ...

    def reserved(self, interacting: Interacting, sites: Sequence[Site]) -> Reserved:
        """The sites that no other mod may rewrite."""
        ...

    def choose(
        self,
        forward: ForwardIR,
        owners: Collection[str],
        kept: Collection[str],
        chains: Sequence[LinearChain],
        found: FusedInteractions,
        unwanted: Collection[str] = (),
    ) -> ChosenInteractions:
        """The interactions of these owners that kernels support.

        They are added to `found`, with the reasons for others. `kept` names sites whose GEMMs stay in the model's
        dtype; interactions in a chain are computed there. Products without a site in `unwanted` modules are in none.
        """
        ...
