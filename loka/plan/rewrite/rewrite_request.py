"""The sites of a plan that need a rewritten forward of their owner, and the owners to trace for them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from loka.graph.ir import Refused
from loka.graph.patterns.owners import Barriers, RegionScope, inline_for, parents
from loka.graph.sites.flow import Flow
from loka.graph.sites.site import GemmKind, Site
from loka.graph.sites.weights import find_weight
from loka.graph.source import has_own_forward
from loka.mods.rewriting.fused_interactions import Interacting
from loka.mods.rewriting.rewriting_tracer import OwnerScope
from loka.numerics.enums import Fuse
from loka.plan.evidence import waits_for_evidence
from loka.plan.plan import SitePlan
from loka.plan.rewrite.site_mods import called_by_owner, weight_of
from loka.policy.settings import SiteSettings


@dataclass(frozen=True, slots=True)
class RewriteRequest:
    """Sites that need the forward of their owner, for one or several reasons, and owners needed without a site."""

    parameters: tuple[Site, ...] = ()  # on Parameters: without a rewritten forward they are not changed
    fused: tuple[Site, ...] = ()  # to be fused with their neighbours
    kept: frozenset[str] = frozenset()  # names of sites whose GEMMs stay in the model's dtype
    chained: frozenset[str] = frozenset()  # names of sites in `fused` with the operands of a chain
    mixing: tuple[Site, ...] = ()  # linears that mixing layers may multiply by
    together: tuple[tuple[str, str], ...] = ()  # for these: the module that holds all that belong together
    products: tuple[tuple[str, str], ...] = ()  # modules without such a site that are inlined there
    owners: frozenset[str] = frozenset()  # modules whose interactions are to be fused
    likely: frozenset[str] = frozenset()  # of these, the ones where sites show signs of an interaction
    unwanted: frozenset[str] = frozenset()  # modules of which no part is to be in an interaction
    changed: frozenset[str] = frozenset()  # names of sites in `parameters` that mods changed, whatever their recipe
    scopes: tuple[OwnerScope, ...] = ()  # modules whose statements mods rewrite
    float64: frozenset[str] = frozenset()  # names of kept sites that are not in `fused` because of their dtype
    barriers: Barriers = field(default_factory=Barriers)  # modules that tracing refused, and units
    flow: Flow = field(default_factory=Flow)  # what products become

    @property
    def sites(self) -> tuple[Site, ...]:
        """All sites, each once."""
        return tuple({site.name: site for site in (*self.parameters, *self.fused, *self.mixing)}.values())

    def only(self, names: Container[str]) -> RewriteRequest:
        """The part of the request that concerns some sites, with all owners."""
        return replace(
            self,
            parameters=tuple(site for site in self.parameters if site.name in names),
            fused=tuple(site for site in self.fused if site.name in names),
            kept=frozenset(name for name in self.kept if name in names),
            chained=frozenset(name for name in self.chained if name in names),
            mixing=tuple(site for site in self.mixing if site.name in names),
            together=tuple((name, owner) for name, owner in self.together if name in names),
            changed=frozenset(name for name in self.changed if name in names),
        )

    def within(self, scope: RegionScope) -> RewriteRequest:
        """The part of the request that concerns a scope."""
        prefix = f"{scope.owner}." if scope.owner else ""
        names = {prefix + name for name in scope.sites}
        inside = {scope.owner, *(prefix + name for name in scope.inline)}
        own = self.only({site.name for site in self.sites if names & {site.name, site.weight, *site.members}})
        scopes = tuple(each for each in self.scopes if each.owner in inside)
        return replace(own, owners=self.owners & inside, scopes=scopes)

    @property
    def around(self) -> Flow:
        """The flow around the sites that are to be fused, and the linears of mixing layers."""
        return self.flow.around({name for site in (*self.fused, *self.mixing) for name in (site.name, *site.members)})

    @property
    def needed(self) -> tuple[Site, ...]:
        """The sites on Parameters that run in FP8 or were changed by a mod."""
        return tuple(site for site in self.parameters if site.name not in self.kept or site.name in self.changed)


def rewrite_request_of(
    plans: Sequence[SitePlan],
    settings: Sequence[SiteSettings],
    interacting: Interacting | None = None,
    changed: frozenset[str] = frozenset(),
    scopes: tuple[OwnerScope, ...] = (),
    float64: frozenset[str] = frozenset(),
    flow: Flow | None = None,
    units: frozenset[str] = frozenset(),
) -> RewriteRequest:
    """The request for the sites of a plan that need, or should get, a rewritten forward of their owner.

    These include the sites changed by mods, `changed` by name, and native ones that are to be fused by policy or
    measurements: only the kernels around their GEMMs are replaced, unless the site is in `float64`. `interacting`
    has the interactions to fuse, `scopes` the owners in which mods rewrite statements, `flow` says what the
    products become, `units` are modules that are not inlined.
    """
    interacting = interacting or Interacting()
    seen = {site.name for site in interacting.sites}
    parameters, fused = list[Site](), list[Site]()
    kept, chained, exact = set[str](), set[str](), set[str]()
    for plan, wanted in zip(plans, settings, strict=True):
        site, always = plan.site, wanted.fuse is Fuse.ALWAYS or plan.gains_by_fusing
        if always and not plan.fp8 and _may_be_fused_in_native_dtype(plan):
            (exact if site.name in float64 else kept).add(site.name)
        fuses = plan.fp8 or site.name in kept
        if not plan.fp8 and site.name in seen:
            kept.add(site.name)
        if not plan.fp8 and site.name not in kept | changed:
            continue
        if site.kind is not GemmKind.LINEAR:
            parameters.append(site)
        if always and fuses:
            fused.append(site)
            if plan.recipe.is_chain or plan.recipe.keeps_wgrad:
                chained.add(site.name)
    return RewriteRequest(
        parameters=tuple(parameters),
        fused=tuple(fused),
        kept=frozenset(kept),
        chained=frozenset(chained),
        mixing=tuple(site for site in interacting.sites if site.kind is GemmKind.LINEAR),
        together=interacting.together,
        products=interacting.products,
        owners=interacting.owners,
        likely=interacting.likely,
        unwanted=interacting.unwanted,
        changed=changed,
        scopes=scopes,
        float64=frozenset(exact),
        barriers=Barriers(closed=units),
        flow=flow or Flow(),
    )


def _may_be_fused_in_native_dtype(plan: SitePlan) -> bool:
    """True if a site could be patched, and what it will run in does not wait for a profile."""
    site = plan.site
    able = not site.blocked and (site.kind is GemmKind.LINEAR or weight_of(site) is not None)
    return able and not waits_for_evidence(plan.gemms)


def scopes_of(request: RewriteRequest, model: nn.Module) -> tuple[RegionScope, ...]:
    """The owners to trace for a request."""
    if not (request.sites or request.owners or request.scopes):
        return ()
    also: dict[str, tuple[str, ...]] = dict.fromkeys(sorted(request.owners), ())
    modules = dict(model.named_modules())
    for module, owner in request.products:
        while owner and request.barriers.is_list(owner, modules):
            owner = owner.rpartition(".")[0]
        if owner not in request.barriers.owners and not request.barriers.around(module, owner):
            also[owner] = (*also.get(owner, ()), module)
    for each in request.scopes:
        also[each.owner] = (*also.get(each.owner, ()), *each.inline)
    return inline_for(
        model, request.sites, request.chained, request.around, dict(request.together), also, request.barriers
    )


def name_in_owner(site: Site, owner: str) -> str:
    """Name of a site's Parameter or linear in the trace of an owner."""
    if site.kind is GemmKind.LINEAR:
        return site.name.removeprefix(f"{owner}.") if owner else site.name
    return called_by_owner(site, owner)


def only_owner(site: Site, model: nn.Module) -> str | None:
    """The one module whose forward can replace a site; None for a plain nn.Linear."""
    if site.kind is GemmKind.LINEAR:
        return None
    try:
        model.get_submodule(site.name)
    except AttributeError:
        return site.owner
    return site.name


def below(owner: str, path: str) -> str:
    """The qualified name of a module inside an owner."""
    return f"{owner}.{path}" if owner else path


def to_close(request: RewriteRequest, scope: RegionScope, refused: Refused, model: nn.Module) -> frozenset[str]:
    """Inlined modules without which an owner may be traced: those of the class that the reason is about.

    Where the reason is about no module in particular, they are those with forwards of their own: first all without a
    site inside, then the outermost; then, if the owner has sites that no other can replace, all that are inlined.
    """
    modules = {path: model.get_submodule(below(scope.owner, path)) for path in scope.inline}
    owner = model.get_submodule(scope.owner)
    if refused.inside == "":
        return frozenset()
    if refused.inside is not None:
        kind = type(owner.get_submodule(refused.inside))
        found = [path for path, module in modules.items() if type(module) is kind and has_own_forward(module)]
        found.append(refused.inside)
    else:
        own = [path for path, module in modules.items() if has_own_forward(module)]
        around = {each for name in scope.sites for each in (name, *parents(name))}
        found = [path for path in own if path not in around] or own
        if not found and any(only_owner(site, model) == scope.owner for site in request.needed):
            found = list(modules)
        found = [path for path in found if not set(found).intersection(parents(path))]
    return frozenset(below(scope.owner, path) for path in found) - request.barriers.closed


def float64_sites(sites: Iterable[Site], model: nn.Module) -> frozenset[str]:
    """The names of the sites that multiply by a float64 Parameter; for merged sites, those of any member."""
    if not any(map(_is_float64, model.parameters())):
        return frozenset()
    found = ((site.name, find_weight(model, name)) for site in sites for name in sorted(_weights(site)))
    return frozenset(name for name, weight in found if weight is not None and _is_float64(weight.parameter))


def float64_modules(names: Iterable[str], model: nn.Module) -> frozenset[str]:
    """The named modules with a float64 Parameter, in themselves or below."""
    return frozenset(name for name in names if any(map(_is_float64, model.get_submodule(name).parameters())))


def _weights(site: Site) -> set[str]:
    """Possible names of a site's Parameters: members have their site's name, a linear its module's."""
    return {site.weight or site.name, *site.members, *(f"{member}.weight" for member in site.members)}


def _is_float64(parameter: nn.Parameter) -> bool:
    return parameter.dtype == torch.float64
