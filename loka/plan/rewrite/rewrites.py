"""Decides which forwards to rewrite for a plan, and collects the results of tracing them.

A plain nn.Linear gets its own forward. A GEMM on a Parameter, or a region around a GEMM, needs the forward of the
module that contains all of it, the owner. Only owners that the plan needs are run and traced.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from loka.graph.ir import ForwardIR, Region
from loka.graph.patterns.linear_chain import ChainStage, LinearChain, StaticOperands, find_chains
from loka.graph.patterns.region import RegionScope, find_regions, inline_for
from loka.graph.refused import Refused
from loka.kernels.fused.norm.norm_spec import ACTIVATIONS, GATES
from loka.kernels.fused.norm.norm_widths import LARGEST_HELD
from loka.kernels.fused.norm.norms import NORMS
from loka.mods.registry import interaction_planning, owner_planning
from loka.mods.rewriting.interactions import FusedInteractions, Interacting
from loka.mods.rewriting.rewriting_tracer import OwnerScope
from loka.numerics.enums import Compute, Fuse
from loka.plan.plan import NOTHING_AROUND, SitePlan, Skipped
from loka.plan.rewrite.site_mods import called_by_owner, named_as_in_model, weight_of
from loka.plan.select.workload import Surroundings, TracedNeighbours
from loka.policy.cascade.settings import SiteSettings
from loka.sites.site import GemmKind, Site

OUTSIDE = "its Parameter belongs to a module outside of the one that multiplies by it"
SEVERAL = "it stands for several calls of one Parameter, which cannot be told apart"
FLOAT64 = "its Parameters are float64, and fused kernels compute in float32"


_STATIC_OPERANDS = StaticOperands(frozenset(NORMS), frozenset(ACTIVATIONS + GATES), LARGEST_HELD)


@dataclass(frozen=True, slots=True)
class RewriteRequest:
    """Sites that need the forward of their owner, for one or several reasons, and owners needed without a site."""

    parameters: tuple[Site, ...] = ()  # on Parameters: without a rewritten forward they are not changed
    fused: tuple[Site, ...] = ()  # to be fused with their neighbours
    kept: frozenset[str] = frozenset()  # names of sites whose GEMMs stay in the model's dtype
    chained: frozenset[str] = frozenset()  # names of sites in `fused` with the operands of a chain
    apart: frozenset[str] = frozenset()  # owners in which chained linears of several modules are not joined
    crossed: tuple[Site, ...] = ()  # linears that cross layers may follow
    together: tuple[tuple[str, str], ...] = ()  # for these: the module that holds all that belong together
    owners: frozenset[str] = frozenset()  # modules whose interactions are to be fused
    changed: frozenset[str] = frozenset()  # names of sites in `parameters` that mods changed, whatever their recipe
    scopes: tuple[OwnerScope, ...] = ()  # modules whose statements mods rewrite
    float64: frozenset[str] = frozenset()  # names of kept sites that are not in `fused` because of their dtype

    @property
    def sites(self) -> tuple[Site, ...]:
        """All sites, each once."""
        return tuple({site.name: site for site in (*self.parameters, *self.fused, *self.crossed)}.values())

    def only(self, names: Container[str]) -> RewriteRequest:
        """The part of the request that concerns some sites, with all owners."""
        return replace(
            self,
            parameters=tuple(site for site in self.parameters if site.name in names),
            fused=tuple(site for site in self.fused if site.name in names),
            kept=frozenset(name for name in self.kept if name in names),
            chained=frozenset(name for name in self.chained if name in names),
            crossed=tuple(site for site in self.crossed if site.name in names),
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
    def without_interactions(self) -> RewriteRequest:
        """The request without the sites and owners that only interactions need."""
        other = {site.name for site in self.needed} | {site.name for site in self.fused}
        return replace(self.only(other), crossed=(), together=(), owners=frozenset())

    @property
    def needed(self) -> tuple[Site, ...]:
        """The sites on Parameters that run in FP8 or were changed by a mod."""
        return tuple(site for site in self.parameters if site.name not in self.kept or site.name in self.changed)


# Traces an owner; sites in the returned forward have names relative to the owner.
Trace = Callable[[RegionScope], "ForwardIR | Refused"]


@dataclass(slots=True)
class Rewrites:
    """Results of the requests. Sites have their names in the model, also in forwards."""

    forwards: dict[str, ForwardIR] = field(default_factory=dict)  # by owner
    refused: dict[str, str] = field(default_factory=dict)  # site on a Parameter -> why it is not changed
    skipped: list[Skipped] = field(default_factory=list)
    regions: dict[str, tuple[str, ...]] = field(default_factory=dict)  # site -> the operations of its region
    notes: dict[str, str] = field(default_factory=dict)  # site -> why its region is not replaced
    chains: list[LinearChain] = field(default_factory=list)  # of FP8 linears with transposed copies
    interactions: FusedInteractions = field(default_factory=FusedInteractions)
    untraced: dict[str, str] = field(default_factory=dict)  # module -> why its statements cannot be rewritten

    @property
    def traced(self) -> TracedNeighbours:
        """The neighbours of sites that tracing found."""
        around = {name: found for chain in self.chains for name, found in _surroundings(chain)}
        chains = tuple(tuple(stage.site for stage in chain.stages) for chain in self.chains)
        return TracedNeighbours(chains, around, frozenset(name for name in self.notes if name not in around))


def _surroundings(chain: LinearChain) -> list[tuple[str, Surroundings]]:
    """Surroundings of each site of a chain: operations after a linear are those before the next."""
    found = []
    before = chain.stages[0].before.kind if chain.stages[0].before is not None else ""
    for number, stage in enumerate(chain.stages):
        after = _after(stage)
        found.append((stage.site, Surroundings(before, after, number == 0, number == len(chain.stages) - 1)))
        before = after
    return found


def _after(stage: ChainStage) -> str:
    norm = [stage.after.kind] if stage.after is not None else []
    return " ".join([*norm, *([stage.activation] if stage.activation is not None else [])])


def rewrite_request_of(
    plans: Sequence[SitePlan],
    settings: Sequence[SiteSettings],
    interacting: Interacting | None = None,
    changed: frozenset[str] = frozenset(),
    scopes: tuple[OwnerScope, ...] = (),
    float64: frozenset[str] = frozenset(),
) -> RewriteRequest:
    """The request for the sites of a plan that need, or should get, a rewritten forward of their owner.

    These include the sites changed by mods, `changed` by name, and those with `fuse: always` that the policy or the
    measurements keep: only the kernels around their GEMMs are replaced, unless the site is in `float64`. `interacting`
    has the interactions to fuse, `scopes` the owners in which mods rewrite statements.
    """
    interacting = interacting or Interacting()
    seen = {site.name for site in interacting.sites}
    parameters, fused = list[Site](), list[Site]()
    kept, chained, exact = set[str](), set[str](), set[str]()
    for plan, wanted in zip(plans, settings, strict=True):
        site, always = plan.site, wanted.fuse is Fuse.ALWAYS or plan.gains_by_fusing
        if always and not plan.fp8 and _may_be_fused_in_native_dtype(plan, wanted):
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
        crossed=tuple(site for site in interacting.sites if site.kind is GemmKind.LINEAR),
        together=interacting.together,
        owners=interacting.owners,
        changed=changed,
        scopes=scopes,
        float64=frozenset(exact),
    )


def _may_be_fused_in_native_dtype(plan: SitePlan, wanted: SiteSettings) -> bool:
    """True if the policy keeps all GEMMs of a site, or their times do, and the site could be patched."""
    site = plan.site
    keeps = all(requested.compute is Compute.KEEP for requested in wanted.gemms.values())
    by_time = plan.timing is not None and plan.timing.kept
    return (keeps or by_time) and not site.blocked and (site.kind is GemmKind.LINEAR or weight_of(site) is not None)


def rewrite(request: RewriteRequest, model: nn.Module, trace: Trace) -> Rewrites:
    """Trace the owners of the sites, and sort the results. Only the structure of `model` is read here."""
    made = Rewrites(notes=dict.fromkeys(sorted(request.float64), FLOAT64))
    wide = float64_modules(request.owners, model)
    made.interactions.refuse(sorted(wide), FLOAT64)
    request = replace(request, owners=request.owners - wide)
    outside = {site.name for site in request.parameters if not _is_inside(site)}
    for owner in dict.fromkeys(site.owner for site in request.parameters if site.name in outside):
        _refuse(
            request.only({site.name for site in request.sites if site.owner == owner} & outside), owner, OUTSIDE, made
        )
    _rewrite(request.only({site.name for site in request.sites} - outside), model, trace, made)
    made.interactions.close(request.owners, interaction_planning().nothing)
    return made


def _is_inside(site: Site) -> bool:
    weight = weight_of(site)
    return weight is not None and (not site.owner or weight.startswith(f"{site.owner}."))


def _rewrite(request: RewriteRequest, model: nn.Module, trace: Trace, made: Rewrites) -> None:
    covered: set[str] = set()
    for scope in scopes_of(request, model):
        own = request.within(scope)
        covered.update(site.name for site in own.sites)
        traced = trace(scope)
        if isinstance(traced, Refused):
            _retry(own, scope, traced.reason, model, trace, made)
        else:
            _take(own, scope, traced, made)
    made.notes.update((site.name, NOTHING_AROUND) for site in request.fused if site.name not in covered)


def scopes_of(request: RewriteRequest, model: nn.Module) -> tuple[RegionScope, ...]:
    """The owners to trace for a request."""
    if not (request.sites or request.owners or request.scopes):
        return ()
    also: dict[str, tuple[str, ...]] = dict.fromkeys(sorted(request.owners), ())
    also |= {each.owner: each.inline for each in request.scopes}
    held = {name: owner for name, owner in request.together if owner not in request.apart}
    return inline_for(model, request.sites, request.chained, lambda owner: owner not in request.apart, held, also)


def _retry(
    request: RewriteRequest, scope: RegionScope, reason: str, model: nn.Module, trace: Trace, made: Rewrites
) -> None:
    """Trace again without the sites that the reason names; otherwise with less joined, fused or chained.

    Statements are then rewritten in the inner modules. If nothing is left, the owner is refused.
    """
    named = {site.name for site in request.parameters if reason.startswith(f"'{called_by_owner(site, scope.owner)}' ")}
    rest = {site.name for site in request.sites} - named
    if named and rest:
        _refuse(request.only(named), scope.owner, reason, made)
        _rewrite(request.only(rest), model, trace, made)
    elif request.scopes:
        made.untraced.update((each.owner, reason) for each in request.scopes)
        within = tuple(inner for each in request.scopes for inner in owner_planning(each.mod).inner(each, model))
        _rewrite(replace(request, scopes=within), model, trace, made)
    elif (request.chained or request.together) and scope.owner not in request.apart:
        _rewrite(replace(request, apart=request.apart | {scope.owner}), model, trace, made)
    elif request.owners or request.crossed:
        made.interactions.refuse(sorted(request.owners), reason)
        _rewrite(request.without_interactions, model, trace, made)
    elif request.chained:
        _rewrite(replace(request, chained=frozenset()), model, trace, made)
    elif request.fused and request.needed:
        _refuse(RewriteRequest(fused=request.fused), scope.owner, reason, made)
        _rewrite(RewriteRequest(request.needed, changed=request.changed), model, trace, made)
    else:
        _refuse(request, scope.owner, reason, made)


def _refuse(request: RewriteRequest, owner: str, reason: str, made: Rewrites) -> None:
    made.refused.update((site.name, reason) for site in request.needed)
    made.notes.update((site.name, reason) for site in request.fused)
    share = sum(site.share for site in request.needed)
    for index, known in enumerate(made.skipped):
        if (known.owner, known.reason) == (owner, reason):
            made.skipped[index] = replace(known, share=known.share + share)
            return
    made.skipped.append(Skipped(owner, reason, share))


def _take(request: RewriteRequest, scope: RegionScope, traced: ForwardIR, made: Rewrites) -> None:
    """Keep a forward if it is needed for the sites on Parameters that it calls, or for a region."""
    fused = {site.name for site in request.fused}
    relative = {called_by_owner(site, scope.owner) for site in request.parameters if site.name in fused}
    relative |= {name for name in scope.sites if (f"{scope.owner}.{name}" if scope.owner else name) in fused}
    found = find_regions(traced, relative)
    forward, lost = named_as_in_model(request.parameters, scope.owner, replace(traced, regions=found))
    made.refused.update((site.name, SEVERAL) for site in lost if site.name not in request.kept)
    chains, worth_fusing = _chained(request, forward)
    made.chains += chains
    in_chains = {stage.site for chain in chains if len(chain.stages) > 1 for stage in chain.stages}
    regions = tuple(
        region
        for region in forward.regions
        if region.last > region.first
        and (region.site in worth_fusing if region.site in request.kept else region.site in fused)
    )
    chosen = interaction_planning().choose(forward, request.owners, request.kept, chains, made.interactions)
    regions = tuple(region for region in regions if not chosen.crosses_in(region))
    made.regions.update((region.site, region.ops) for region in regions)
    made.regions.update((site, ops) for site, ops in chosen.regions if site not in made.regions)
    around = {region.site for region in regions}.union(site for site, _ in chosen.regions)
    made.notes.update((name, "" if name in in_chains else NOTHING_AROUND) for name in fused - around)
    if around or chosen.any or forward.rewritten or any(site not in lost for site in request.needed):
        made.forwards[scope.owner] = replace(
            forward, regions=regions, mixes=chosen.mixes, joins=chosen.joins, crosses=chosen.crosses
        )


def _chained(request: RewriteRequest, forward: ForwardIR) -> tuple[tuple[LinearChain, ...], set[str]]:
    """The chains of FP8 linears, and the native sites that kernels can fuse with something."""
    sizes = {site.name: (site.k, site.n) for site in request.sites}
    fp8 = [region for region in forward.regions if region.site in request.chained]
    worth_fusing: set[str] = set()
    for chain in find_chains(forward, _wanted(forward, request.kept), _STATIC_OPERANDS, sizes=sizes):
        if chain.last > chain.first:
            worth_fusing.update(stage.site for stage in chain.stages)
    return find_chains(forward, fp8, _STATIC_OPERANDS, sizes=sizes), worth_fusing


def _wanted(forward: ForwardIR, names: Container[str]) -> tuple[Region, ...]:
    return tuple(region for region in forward.regions if region.site in names and region.last > region.first)


def with_regions(plans: Sequence[SitePlan], rewrites: Rewrites) -> tuple[SitePlan, ...]:
    """The plans with the results for their regions."""
    if not rewrites.regions and not rewrites.notes:
        return tuple(plans)
    return tuple(_with_region(plan, rewrites) for plan in plans)


def _with_region(plan: SitePlan, rewrites: Rewrites) -> SitePlan:
    name = plan.site.name
    if name in rewrites.regions:
        return replace(plan, region=rewrites.regions[name], region_note="")
    if name in rewrites.notes and name not in rewrites.refused:  # the reason of a refusal is in its GEMMs
        return replace(plan, region=(), region_note=rewrites.notes[name])
    return plan


def float64_sites(sites: Iterable[Site], model: nn.Module) -> frozenset[str]:
    """The names of the sites that multiply by a float64 Parameter; for merged sites, those of any member."""
    wide = {name for name, parameter in model.named_parameters(remove_duplicate=False) if _is_float64(parameter)}
    return frozenset(site.name for site in sites if wide and not wide.isdisjoint(_weights(site)))


def float64_modules(names: Iterable[str], model: nn.Module) -> frozenset[str]:
    """The named modules with a float64 Parameter, in themselves or below."""
    return frozenset(name for name in names if any(map(_is_float64, model.get_submodule(name).parameters())))


def _weights(site: Site) -> set[str]:
    """Possible names of a site's Parameters: members have their site's name, a linear its module's."""
    return {site.weight or site.name, *site.members, *(f"{member}.weight" for member in site.members)}


def _is_float64(parameter: nn.Parameter) -> bool:
    return parameter.dtype == torch.float64
