"""A model's sites while mods of sites change them one after the other, and the outcome of each entry of a policy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from loka.graph.ir import ForwardIR, Refused, Shape
from loka.graph.patterns.owners import RegionScope, functions_beside, relative, scope_of
from loka.graph.sites.flow import common_module
from loka.graph.sites.site import Site
from loka.graph.sites.weights import find_weight
from loka.graph.trace.tracer import Tracer
from loka.mods.adaptation import RewriteResult, Unchanged
from loka.mods.rewriting.fused_interactions import NAME as FUSE_INTERACTION
from loka.mods.rewriting.rewriting_tools import Size
from loka.mods.rewriting.rewriting_tracer import JoinedSites, OwnedChange, RewritingTracer
from loka.policy.policy import ModRule
from loka.policy.settings import SiteSettings

_SEVERAL = "its Parameter is used at several places, which cannot be told apart"

# Of a forward, its sites and the shapes of its locals: the changes that are possible, and reasons for other sites.
Find = Callable[[ForwardIR, Mapping[str, Size], Mapping[str, Shape]], tuple[Sequence[JoinedSites], Sequence[Unchanged]]]


class ModelInChange:
    """The model's sites while mods change them.

    `settings[i]` belongs to `sites[i]`; `siblings` are names of sites that seem to read one tensor
    (`SiteMap.siblings`). `reserved` are names of those that interactions take.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        settings: Sequence[SiteSettings],
        siblings: Sequence[tuple[str, ...]],
        tracer: Tracer,
        reserved: frozenset[str],
    ) -> None:
        self.sites = {site.name: site for site in sites}
        self.settings = {site.name: wanted for site, wanted in zip(sites, settings, strict=True)}
        self.siblings = siblings
        self.reserved = reserved
        self.modules = dict(tracer.model.named_modules())
        self.model = tracer.model
        self.trace = RewritingTracer(tracer)
        self._plain: set[str] = set()  # owners that are read only without the modules of the user's own in them
        self._together: dict[str, list[str]] = {}  # by owner, what its forward is read with, whatever is looked at

    def capture(self, names: Mapping[str, Sequence[str]]) -> None:
        """Run the model once to capture the calls of the modules that have these sites, by the modules' names.

        From then on each is traced with all of its sites: once for all changes of its forward.
        """
        self._together = {owner: self._read(owner, sites) for owner, sites in names.items()}
        self.trace.capture(tuple(names))

    def look(self, owner: str, names: Sequence[str]) -> tuple[ForwardIR, dict[str, Shape]] | Refused:
        """The forward of a module with the changes so far, and the shapes of its locals; or the reason why not."""
        scope = self._scope(owner, names)
        found = self.trace(scope)
        if isinstance(found, Refused) and self._together.pop(owner, None) is not None:
            scope = self._scope(owner, names)
            found = self.trace(scope)
        if isinstance(found, Refused) and owner not in self._plain:
            self._plain.add(owner)
            scope = self._scope(owner, names)
            found = self.trace(scope)
            if isinstance(found, Refused):
                self._plain.remove(owner)
        return found if isinstance(found, Refused) else (found, self.trace.shapes(scope, found))

    def _scope(self, owner: str, names: Sequence[str]) -> RegionScope:
        read = [*self._together.get(owner, ()), *self._read(owner, names)]
        scope = scope_of(owner, read, self.modules)
        return replace(scope, inline=functions_beside(owner, read, self.modules)) if owner in self._plain else scope

    def _read(self, owner: str, names: Sequence[str]) -> list[str]:
        """The names of the weights that some sites read."""
        return [member for name in names for member in self.sites[name].members or (self._weight_name(name, owner),)]

    def _weight_name(self, name: str, owner: str) -> str:
        return name if name in self.modules and name != owner else self.sites[name].weight or name

    def called(self, name: str, owner: str) -> str:
        """Name of a site in an owner's forward."""
        site = self.sites[name]
        return relative(name if site.members else self._weight_name(name, owner), owner)

    def take(self, owned: OwnedChange, names: Sequence[str], site: Site) -> str | None:
        """Apply a change of some sites, which become one; or return the reason why not, with nothing changed."""
        self.trace.add(owned)
        found = self.trace(self._scope(owned.owner, names))
        if isinstance(found, Refused):
            self.trace.drop(owned)
            return found.reason
        if site.name in names:
            self.sites[site.name] = site
            return None
        first = next(name for name in self.sites if name in names)  # the new site stands in its place
        sites = [
            site if name == first else old for name, old in self.sites.items() if name == first or name not in names
        ]
        self.sites = {each.name: each for each in sites}
        self.settings = {name: self.settings.get(name, self.settings[names[0]]) for name in self.sites}
        return None

    def unsupported_reason(self, site: Site) -> str | None:
        """Reason why a site cannot be part of a rewritten forward; None where it can."""
        if site.blocked is not None:
            return site.blocked
        if not (site.members or site.name in self.modules or site.name == site.weight):
            return _SEVERAL
        if site.name in self.reserved:
            return (
                f"{FUSE_INTERACTION} takes it into a kernel as it is written; leave its owner out of that mod's match "
                "instead"
            )
        return None

    def kind_of_weight(self, site: Site) -> tuple[object, ...]:
        """Properties that weights must share to be combined: dtype and device."""
        weight = find_weight(self.model, site.weight) if site.weight is not None else None
        return (None,) if weight is None else (weight.parameter.dtype, weight.parameter.device)

    def around(self, names: Sequence[str]) -> str:
        """The smallest module with a forward that contains the calls of some sites."""
        owner = common_module([self.sites[name].owner for name in names])
        while isinstance(self.modules[owner], nn.ModuleList | nn.ModuleDict):
            owner = owner.rpartition(".")[0]
        return owner


class SiteOutcome:
    """Collects the changes of one entry, and the sites it does not change.

    `usual` are reasons that are not reported if other sites were changed, as a broad pattern does not mean such sites.
    """

    def __init__(self, model: ModelInChange, rule: ModRule, usual: Collection[str] = ()) -> None:
        self.rewritten: list[RewriteResult] = []
        self._model, self._rule, self._usual = model, rule, usual
        self._left: dict[str, str] = {}  # site -> reason

    @property
    def unchanged(self) -> tuple[Unchanged, ...]:
        """The sites that are not changed, except those with usual reasons if others were changed."""
        changed = {site for each in self.rewritten for site in (*each.sites, each.site)}
        return tuple(
            Unchanged(name, reason)
            for name, reason in self._left.items()
            if name not in changed and (reason not in self._usual or self._rule.names(name) or not self.rewritten)
        )

    def leave(self, names: Collection[str], reason: str) -> None:
        """Record the reason why sites are not changed; the first reason counts."""
        for name in names:
            self._left.setdefault(name, reason)

    def wanted(self) -> list[Site]:
        """The sites of the entry that can be rewritten; a merged site only if the entry matches all of its members."""
        wanted = []
        for site in self._model.sites.values():
            names = site.members or (site.name,)
            meant = [name for name in names if self._rule.wants(name)]
            reason = self._model.unsupported_reason(site)
            if reason is not None:
                self.leave(meant, reason)
            elif len(meant) < len(names):
                self.leave(meant, f"it is one GEMM with others, {site.name!r}, that are not all meant")
            else:
                wanted.append(site)
        return wanted

    def traced(
        self, names: Sequence[str], owner: str
    ) -> Iterator[tuple[ForwardIR, dict[str, Shape], dict[str, Size], dict[str, str]]]:
        """An owner's forward, the shapes of its locals, its sites' sizes, and their names in the model.

        Yields nothing if it cannot be traced with any of the sites; sites that prevent tracing are left out.
        """
        model, names = self._model, list(names)
        while names:
            called = {model.called(name, owner): name for name in names}
            seen = model.look(owner, names)
            if not isinstance(seen, Refused):
                sizes = {inner: Size(model.sites[name].k, model.sites[name].n) for inner, name in called.items()}
                yield *seen, sizes, called
                return
            odd = [name for inner, name in called.items() if seen.reason.startswith(f"'{inner}' ")]
            self.leave(odd or names, seen.reason)
            names = [name for name in names if name not in odd] if odd else []

    def join(self, owner: str, names: Sequence[str], find: Find, joined: Callable[..., Site]) -> None:
        """Apply the changes found in an owner's forward, each of which makes one site of several.

        `joined` returns that site, from its name, its owner and its members.
        """
        for forward, shapes, sizes, called in self.traced(names, owner):
            changes, unchanged = find(forward, sizes, shapes)
            for each in unchanged:
                self.leave([called[each.name]], each.reason)
            for change in changes:
                members = [called[name] for name in change.members]
                name = f"{owner}.{change.name}" if owner else change.name
                site = joined(name, owner, [self._model.sites[member] for member in members])
                self.take(OwnedChange(owner, change), members, site, change.what)

    def take(self, owned: OwnedChange, members: Sequence[str], site: Site, what: str) -> None:
        """Apply a change that replaces sites by `site`, or leave them if the function would change.

        `what` describes the change, without names that differ between layers.
        """
        reason = self._model.take(owned, members, site)
        if reason is not None:
            self.leave(members, reason)
            return
        self.rewritten.append(RewriteResult(owned.change.mod, owned.owner, tuple(members), site.name, what))


def joined_site(name: str, owner: str, members: Sequence[Site], **changes: Any) -> Site:
    """The site that several have become: the shares of FLOPs add up; `changes` are fields that depend on the mod."""
    return replace(
        members[0],
        name=name,
        owner=owner,
        weight=None,
        bias=None,
        share=sum(site.share for site in members),
        input_grad=any(site.input_grad for site in members),
        weight_grad=any(site.weight_grad for site in members),
        members=tuple(site.name for site in members),
        **changes,
    )
