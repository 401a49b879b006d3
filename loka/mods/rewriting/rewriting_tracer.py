"""Changes that mods make to forwards, and the tracer that applies them: every user sees the rewritten forward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import ClassVar, Self

from torch import nn

from loka.graph.equivalence import rounding_difference
from loka.graph.ir import CannotTraceError, ForwardIR, Refused, Shape
from loka.graph.patterns.owners import RegionScope, functions_beside, relative
from loka.graph.trace.observed_shapes import observed_shapes
from loka.graph.trace.trace import copy_owner, expanded, with_findings
from loka.graph.trace.tracer import Tracer


@dataclass(frozen=True, slots=True)
class SiteChange:
    """A change of calls of sites in a forward, hashable; sites have their names in the forward."""

    mod: ClassVar[str]  # its name in policies
    name: str  # of the site that it makes; one of `members` if that stays
    members: tuple[str, ...]  # the sites whose calls it changes

    def under(self, rename: Callable[[str], str]) -> Self:
        """The same with its sites renamed."""
        return replace(self, name=rename(self.name), members=tuple(map(rename, self.members)))

    @abstractmethod
    def rewritten(self, forward: ForwardIR) -> ForwardIR:
        """The forward with the change applied. Raises LokaError where the calls are not the expected ones."""


@dataclass(frozen=True, slots=True)
class JoinedSites(SiteChange):
    """A change that makes one site of several."""

    @property
    @abstractmethod
    def what(self) -> str:
        """Description, without names that differ between layers: "2 linears over one input are one GEMM"."""


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


@dataclass(slots=True)
class RewritingTracer:
    """Traces owners and applies the changes of their forwards; has the interface of `Tracer`."""

    tracer: Tracer
    _owned: dict[str, list[tuple[int, OwnedChange]]] = field(default_factory=dict)  # by owner, numbered in order
    _count: int = 0
    _made: dict[object, ForwardIR | str] = field(default_factory=dict)  # or the difference, in words
    _modules: dict[str, nn.Module] = field(default_factory=dict)  # of the model, filled on demand

    def add(self, owned: OwnedChange) -> None:
        """Apply a change from now on to every forward that contains its owner, after earlier changes."""
        self._owned.setdefault(owned.owner, []).append((self._count, owned))
        self._count += 1

    def drop(self, owned: OwnedChange) -> None:
        """Undo the change that was added last."""
        self._owned[owned.owner].pop()

    def capture(self, owners: Collection[str]) -> None:
        """Run the model to capture the calls of some modules."""
        self.tracer.capture(owners)

    def __call__(self, scope: RegionScope) -> ForwardIR | Refused:
        """The rewritten forward of one owner, or the reason why not; its sites are those made by mods."""
        if not self._owned:
            return self.tracer(scope)
        module = self.tracer.model.get_submodule(scope.owner)
        inside = expanded(module, scope.inline, scope.sites)
        owners = [scope.owner, *(f"{scope.owner}.{path}".lstrip(".") for path in inside)]
        found = sorted(((n, owned) for owner in owners for n, owned in self._owned.get(owner, ())), key=itemgetter(0))
        changes = [owned.seen_from(scope.owner) for _, owned in found]
        scope = self._with_sites(scope, _read_by(changes))
        traced = self.tracer(scope)
        if isinstance(traced, Refused) or not changes:
            return traced
        key = (replace(traced, owner=""), tuple(changes))
        if key not in self._made:
            self._made[key] = self._rewritten(scope, traced, changes)
        made = self._made[key]
        return Refused(scope.owner, made) if isinstance(made, str) else replace(made, owner=scope.owner)

    def _with_sites(self, scope: RegionScope, sites: Collection[str]) -> RegionScope:
        """The scope with further sites of its owner, and the activations next to these inlined as at their change.

        An activation called as a module could change part of a merged product in place.
        """
        names = [f"{scope.owner}.{name}".lstrip(".") for name in sites]
        self._modules = self._modules or dict(self.tracer.model.named_modules())
        inline = tuple(sorted({*scope.inline, *functions_beside(scope.owner, names, self._modules)}))
        return replace(scope, inline=inline, sites=tuple(dict.fromkeys((*scope.sites, *sites))))

    def shapes(self, scope: RegionScope, forward: ForwardIR) -> dict[str, Shape]:
        """The shapes of the locals of a forward from this tracer."""
        module = self.tracer.model.get_submodule(scope.owner)
        inside = expanded(module, scope.inline, scope.sites)
        examples = self.tracer.examples(scope.owner)
        return dict(observed_shapes(forward, examples, lambda: copy_owner(module, inside)))

    def _rewritten(self, scope: RegionScope, traced: ForwardIR, changes: Collection[SiteChange]) -> ForwardIR | str:
        """The forward with the changes applied, checked against the module's own; or the difference, in words."""
        forward = traced
        for change in changes:
            forward = change.rewritten(forward)
        return checked(self.tracer, scope, forward, tuple(dict.fromkeys(change.mod for change in changes)))


def checked(tracer: Tracer, scope: RegionScope, forward: ForwardIR, mods: tuple[str, ...]) -> ForwardIR | str:
    """The forward that mods have rewritten, checked against the module's own; or the difference, in words."""
    module, examples = tracer.model.get_submodule(scope.owner), tracer.examples(scope.owner)
    inside = expanded(module, scope.inline, scope.sites)

    def copied() -> nn.Module:
        return copy_owner(module, inside, share=tracer.quick)

    try:
        different = rounding_difference(module, forward, examples, copied, tracer.quick)
        if different is not None:
            return different
        shapes = observed_shapes(forward, examples, copied)
    except CannotTraceError as error:
        return str(error)
    return with_findings(replace(forward, rewritten=mods), shapes)


def _read_by(changes: Collection[SiteChange]) -> tuple[str, ...]:
    """The sites that changes read and no earlier change makes."""
    made: set[str] = set()
    read: dict[str, None] = {}
    for change in changes:
        read.update(dict.fromkeys(site for site in change.members if site not in made))
        made.add(change.name)
    return tuple(read)


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
