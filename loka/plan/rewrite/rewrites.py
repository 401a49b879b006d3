"""Decides which forwards to rewrite for a plan, and collects the results of tracing them.

A plain nn.Linear gets its own forward. A GEMM on a Parameter, or a region around a GEMM, needs the forward of the
module that contains all of it, the owner. Only owners that the plan needs are run and traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import nn

from loka.graph.expression import Ref
from loka.graph.ir import ForwardIR, NearKind, Refused, Region
from loka.graph.patterns.linear_chain import LinearChain, StaticOperands, find_chains
from loka.graph.patterns.norm import BATCH_NORM, ChainNorm
from loka.graph.patterns.owners import RegionScope, wants_owner
from loka.graph.patterns.region import find_regions
from loka.graph.sites.site import Site
from loka.kernels.fused.kernel_values import LARGEST_HELD
from loka.kernels.fused.norm.activations import ACTIVATIONS, GATES, name_and_constants
from loka.kernels.fused.norm.norms import NORMS
from loka.mods.registry import owner_mod
from loka.mods.rewriting.fused_interactions import FusedInteractions, choose_interactions
from loka.plan.plan import NOTHING_AROUND, SitePlan, Skipped
from loka.plan.rewrite.rewrite_request import (
    RewriteRequest,
    float64_modules,
    name_in_owner,
    only_owner,
    scopes_of,
    to_close,
)
from loka.plan.rewrite.site_mods import called_by_owner, named_as_in_model, weight_of
from loka.plan.select.workload import DROPOUT, TIMES, Surroundings, TracedNeighbours

OUTSIDE = "its Parameter belongs to a module outside of the one that multiplies by it"
SEVERAL = "it stands for several calls of one Parameter, which cannot be told apart"
FLOAT64 = "its Parameters are float64, and fused kernels compute in float32"

_MODULES = frozenset({BATCH_NORM, DROPOUT})
KERNEL_OPERATIONS = StaticOperands(frozenset(NORMS), frozenset({*ACTIVATIONS, *GATES}), LARGEST_HELD)


class Trace(Protocol):
    """Traces owners. Sites in a traced forward have names relative to the owner."""

    def __call__(self, scope: RegionScope) -> ForwardIR | Refused:
        """The forward of one owner, or the reason why it cannot be traced."""


@dataclass(slots=True)
class Rewrites:
    """Results of the requests. Sites have their names in the model, also in forwards."""

    forwards: dict[str, ForwardIR] = field(default_factory=dict)  # by owner
    refused: dict[str, str] = field(default_factory=dict)  # site on a Parameter -> why it is not changed
    skipped: list[Skipped] = field(default_factory=list)
    regions: dict[str, tuple[str, ...]] = field(default_factory=dict)  # site -> the operations of its region
    notes: dict[str, str] = field(default_factory=dict)  # site -> why its region is not replaced
    near: dict[str, str] = field(default_factory=dict)  # site -> what keeps the next operation out of its region
    chains: list[LinearChain] = field(default_factory=list)  # of FP8 linears with transposed copies
    native: list[LinearChain] = field(default_factory=list)  # of linears in the model's dtype that are fused
    interactions: FusedInteractions = field(default_factory=FusedInteractions)
    untraced: dict[str, str] = field(default_factory=dict)  # module -> why its statements cannot be rewritten

    @property
    def traced(self) -> TracedNeighbours:
        """The neighbours of sites that tracing found."""
        around = {name: found for chain in (*self.native, *self.chains) for name, found in _surroundings(chain)}
        chains = tuple(tuple(stage.site for stage in chain.stages) for chain in self.chains)
        return TracedNeighbours(chains, around, frozenset(name for name in self.notes if name not in around))


def _surroundings(chain: LinearChain) -> list[tuple[str, Surroundings]]:
    """Surroundings of each site of a chain: operations after a linear are those before the next."""
    found = []
    first = chain.stages[0]
    before = _words(first.before, first.before_activation, first.before_multiplier)
    for number, stage in enumerate(chain.stages):
        words = _words(stage.after, stage.activation, stage.multiplier)
        after = " ".join(filter(None, (words, DROPOUT if stage.dropout is not None else "")))
        found.append((stage.site, Surroundings(before, after, number == 0, number == len(chain.stages) - 1)))
        before = after
    return found


def _words(norm: ChainNorm | None, activation: str | None, multiplier: Ref | None) -> str:
    words = [norm.kind] if norm is not None else []
    words += [name_and_constants(activation)[0]] if activation is not None else []
    return " ".join([*words, *[TIMES] * (multiplier is not None)])


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
            _retry(own, scope, traced, model, trace, made)
        else:
            _take(own, scope, traced, made)
    for site in request.fused:
        if site.name not in covered:
            made.notes.setdefault(site.name, NOTHING_AROUND)


def _retry(
    request: RewriteRequest, scope: RegionScope, refused: Refused, model: nn.Module, trace: Trace, made: Rewrites
) -> None:
    """Trace again without the sites that the reason names; otherwise with fewer modules inlined, or smaller owners.

    Statements are then rewritten in the inner modules. Sites that only this owner could replace are refused.
    """
    owner, reason = scope.owner, refused.reason
    named = {site.name for site in request.sites if reason.startswith(f"'{name_in_owner(site, owner)}' ")}
    rest = {site.name for site in request.sites} - named
    closing = to_close(request, scope, refused, model) if not request.scopes else frozenset()
    if not refused.called and isinstance(model.get_submodule(owner), nn.Sequential):
        barriers = replace(request.barriers, uncalled=request.barriers.uncalled | {owner})
        _rewrite(replace(request, barriers=barriers), model, trace, made)
    elif named and rest:
        _refuse(request.only(named), owner, reason, made)
        _rewrite(request.only(rest), model, trace, made)
    elif request.scopes:
        made.untraced.update((each.owner, reason) for each in request.scopes)
        within = tuple(inner for each in request.scopes for inner in owner_mod(each.mod).inner(each, model))
        _rewrite(replace(request, scopes=within), model, trace, made)
    elif closing:
        made.notes.update((site.name, reason) for site in request.fused if site.name in closing)
        barriers = replace(request.barriers, closed=request.barriers.closed | closing)
        _rewrite(replace(request, barriers=barriers), model, trace, made)
    else:
        stuck = {site.name for site in request.sites if only_owner(site, model) == owner}
        made.interactions.refuse(request.owners & request.likely & {owner}, reason)
        made.interactions.untraced.update(dict.fromkeys(request.owners & {owner} - request.likely, reason))
        wanted = wants_owner(model, request.sites, owner, request.around, request.barriers)
        if stuck or wanted:  # not for a longer chain alone
            fused = tuple(site for site in request.fused if site.name in wanted)
            _refuse(replace(request.only(stuck), fused=fused), owner, reason, made)
        barriers = replace(request.barriers, owners=request.barriers.owners | {owner})
        inner = request.only({site.name for site in request.sites} - stuck)
        _rewrite(replace(inner, owners=request.owners - {owner}, barriers=barriers), model, trace, made)


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
    norms = (near for near in forward.near if near.kind is NearKind.NORM)
    made.near.update((call.site, near.missing) for near in norms if (call := forward.statements[near.place].call))
    chains, kept_chains = _chained(request, forward)
    made.chains += chains
    native = [chain for chain in kept_chains if chain.last > chain.first]
    made.native += native
    worth_fusing = {stage.site for chain in native for stage in chain.stages}
    in_chains = {stage.site for chain in chains if len(chain.stages) > 1 for stage in chain.stages}
    regions = tuple(
        region
        for region in forward.regions
        if region.last > region.first
        and (region.site in worth_fusing if region.site in request.kept else region.site in fused)
    )
    chosen = choose_interactions(forward, request.owners, request.kept, chains, made.interactions, request.unwanted)
    fused_with = {region.site: ops for region in regions if len(ops := _taken_of(region, (*chains, *kept_chains))) > 1}
    made.regions.update(fused_with)
    made.regions.update((site, ops) for site, ops in chosen.regions if site not in made.regions)
    around = set(fused_with).union(site for site, _ in chosen.regions)
    made.notes.update(
        (name, "" if name in in_chains else made.notes.get(name) or NOTHING_AROUND) for name in fused - around
    )
    patterns = replace(
        forward,
        regions=regions,
        near=(),
        mixes=chosen.mixes,
        joins=chosen.joins,
        dots=chosen.dots,
    )
    called = {step.call.site for step in patterns.statements if step.call is not None}
    if around or chosen.any or forward.rewritten or any(site.name in called for site in request.needed):
        made.forwards[scope.owner] = patterns


def _taken_of(region: Region, chains: Sequence[LinearChain]) -> tuple[str, ...]:
    """The operations of a region that the chain of its site takes, and a norm before it.

    All where it has no chain; none there with modules in it, which chains alone compute.
    """
    found = ((chain, stage) for chain in chains for stage in chain.stages if stage.site == region.site)
    chain, stage = next(found, (None, None))
    if chain is None or stage is None:
        return region.ops if _MODULES.isdisjoint(region.ops) else ()
    places = range(region.first, region.last + 1)
    ops = [op for place, op in zip(places, region.ops, strict=True) if chain.first <= place <= chain.last]
    own = region.first == stage.linear
    before = _words(stage.before, stage.before_activation, stage.before_multiplier) if own else ""
    return (*before.split(), *ops)


def _chained(request: RewriteRequest, forward: ForwardIR) -> tuple[tuple[LinearChain, ...], tuple[LinearChain, ...]]:
    """The chains of FP8 linears, and those of native ones."""
    fp8 = [region for region in forward.regions if region.site in request.chained]
    kept = [region for region in forward.regions if region.site in request.kept]
    # As generated code has it: a native chain takes neither sums nor products with matrices.
    native = find_chains(forward, kept, KERNEL_OPERATIONS, sums=lambda site: False)
    return find_chains(forward, fp8, KERNEL_OPERATIONS), native


def with_regions(plans: Sequence[SitePlan], rewrites: Rewrites) -> tuple[SitePlan, ...]:
    """The plans with the results for their regions."""
    if not rewrites.regions and not rewrites.notes:
        return tuple(plans)
    return tuple(_with_region(plan, rewrites) for plan in plans)


def _with_region(plan: SitePlan, rewrites: Rewrites) -> SitePlan:
    name = plan.site.name
    if name in rewrites.regions:
        return replace(plan, region=rewrites.regions[name], region_note=rewrites.near.get(name, ""))
    if name in rewrites.notes and name not in rewrites.refused:  # the reason of a refusal is in its GEMMs
        note = rewrites.notes[name]
        unknown = note in ("", NOTHING_AROUND)
        return replace(plan, region=(), region_note=rewrites.near.get(name, note) if unknown else note)
    return plan
