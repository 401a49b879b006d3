"""Protocols of mods, one for each kind (`loka.mods.registry.ModKind`), and the values they exchange.

Imports torch and the standard library only, as mods of modules do: training machines apply these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor, nn

from loka.mods.adaptation import Adaptation, Setting, Unchanged

if TYPE_CHECKING:
    from loka.graph.ir import ForwardIR
    from loka.graph.sites.flow import Flow
    from loka.graph.sites.site import Site
    from loka.mods.dataflow import Adaptable
    from loka.mods.rewriting.rewriting_tracer import OwnerScope, RewrittenOwner
    from loka.mods.rewriting.site_rewriting import ModelInChange, SiteOutcome
    from loka.policy.policy import ModRule


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

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the adapted modules."""
        return tuple(name for adaptation in self.adaptations for name in adaptation.modules)


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
class Mod(Protocol):
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


@runtime_checkable
class ModuleMod(Mod, Protocol):
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

    def unsupported_reason(self, model: nn.Module, name: str, adaptation: Adaptation) -> str | None:
        """Reason why a module of an adaptation cannot be changed: it is not the planned one. None where it can."""
        ...

    def is_done(self, model: nn.Module, name: str, adaptation: Adaptation, last: bool) -> bool:
        """True if a module of an adaptation has been changed; `last`: and no later adaptation changed it again."""
        ...

    def change(self, model: nn.Module, adaptation: Adaptation) -> None:
        """Change the modules of an adaptation in place. The caller has checked that they are the planned ones."""
        ...

    def convert(self, state: dict[str, Tensor], adaptation: Adaptation) -> tuple[Unchanged, ...]:
        """Convert a state_dict of the original model to the adapted one's, in place.

        Returns what is lost, each with its reason; it is removed in any case.
        """
        ...


@runtime_checkable
class ForwardMod(Mod, Protocol):
    """A mod that rewrites forwards: the function stays the same."""

    def proposal(self, model: UnplannedModel) -> str | None:
        """Possible changes in a model, for `loka init`: "6 sites read 3 tensors"; None for none."""
        ...


@runtime_checkable
class SiteMod(ForwardMod, Protocol):
    """A mod that rewrites calls of sites in the forwards of their owners."""

    def rewrite_sites(self, model: ModelInChange, rule: ModRule) -> SiteOutcome:
        """Apply one entry, change by change; a change that would not keep the function is never made."""
        ...


@runtime_checkable
class OwnerMod(ForwardMod, Protocol):
    """A mod that rewrites the statements of owners, after mods have rewritten the calls of sites in them."""

    @property
    def nothing(self) -> str:
        """Reason for a forward without anything to rewrite."""
        ...

    def scopes(self, model: nn.Module, wants: Callable[[str], bool], flow: Flow) -> tuple[OwnerScope, ...]:
        """The wanted modules whose forwards are to be traced; `flow` has the operations of each."""
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
