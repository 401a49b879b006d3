"""A model's sites while mods that rewrite forwards change them, one after the other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile

from torch import nn

from loka.graph.ir import ForwardIR
from loka.graph.patterns.owners import RegionScope, scope_of
from loka.graph.refused import Refused
from loka.graph.trace.observed_shapes import Shape
from loka.graph.trace.tracer import Tracer
from loka.mods.rewriting.interactions import Reserved
from loka.mods.rewriting.rewriting_tracer import RewritingTracer
from loka.mods.rewriting.site_change import OwnedChange, relative
from loka.policy.settings import SiteSettings
from loka.sites.site import Site
from loka.sites.weights import find_weight

_SEVERAL = "its Parameter is used at several places, which cannot be told apart"


class ModelInChange:
    """The model's sites while mods change them.

    `settings[i]` belongs to `sites[i]`; `siblings` are names of sites that seem to read one tensor
    (`SiteMap.siblings`). `reserved` are sites that another mod needs unchanged.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        settings: Sequence[SiteSettings],
        siblings: Sequence[tuple[str, ...]],
        tracer: Tracer,
        reserved: Reserved,
    ) -> None:
        self.sites = {site.name: site for site in sites}
        self.settings = {site.name: wanted for site, wanted in zip(sites, settings, strict=True)}
        self.siblings = siblings
        self.reserved = reserved
        self.modules = dict(tracer.model.named_modules())
        self.model = tracer.model
        self.trace = RewritingTracer(tracer)

    def capture(self, owners: Collection[str]) -> None:
        """Run the model once to capture the calls of some modules."""
        self.trace.capture(tuple(dict.fromkeys(owners)))

    def look(self, owner: str, names: Sequence[str]) -> tuple[ForwardIR, dict[str, Shape]] | Refused:
        """The forward of a module with the changes so far, and the shapes of its locals; or the reason why not."""
        scope = self._scope(owner, names)
        found = self.trace(scope)
        return found if isinstance(found, Refused) else (found, self.trace.shapes(scope, found))

    def _scope(self, owner: str, names: Sequence[str]) -> RegionScope:
        read = [member for name in names for member in self.sites[name].members or (self._weight_name(name, owner),)]
        return scope_of(owner, read, self.modules)

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
        wanted = self.settings[names[0]]
        places = {name: place for place, name in enumerate(self.sites)}
        first = min(names, key=lambda name: places[name])
        sites, settings = self.sites, self.settings
        self.sites = {new.name: new for name, old in sites.items() if (new := self._new(name, old, first, names, site))}
        self.settings = {name: settings.get(name, wanted) for name in self.sites}
        return None

    @staticmethod
    def _new(name: str, old: Site, first: str, names: Collection[str], site: Site) -> Site | None:
        return site if name == first else None if name in names else old

    def unsupported_reason(self, site: Site) -> str | None:
        """Reason why a site cannot be part of a rewritten forward; None where it can."""
        if site.blocked is not None:
            return site.blocked
        if not (site.members or site.name in self.modules or site.name == site.weight):
            return _SEVERAL
        if site.name in self.reserved.sites:
            return (
                f"{self.reserved.mod} takes it into a kernel as it is written; leave its owner out of that mod's match "
                "instead"
            )
        return None

    def kind_of_weight(self, site: Site) -> tuple[object, ...]:
        """Properties that weights must share to be combined: dtype and device."""
        weight = find_weight(self.model, site.weight) if site.weight is not None else None
        return (None,) if weight is None else (weight.parameter.dtype, weight.parameter.device)

    def around(self, names: Sequence[str]) -> str:
        """The smallest module with a forward that contains the calls of some sites."""
        owners = [self.sites[name].owner.split(".") for name in names]
        same = takewhile(lambda step: len(set(step)) == 1, zip(*owners, strict=False))
        owner = ".".join(step[0] for step in same)
        while isinstance(self.modules[owner], nn.ModuleList | nn.ModuleDict):
            owner = owner.rpartition(".")[0]
        return owner
