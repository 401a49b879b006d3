"""Whose forward has to be rewritten for a plan, and what tracing made of it.

A plain nn.Linear gets a forward of its own. A GEMM on a Parameter, or a region around a GEMM, needs the forward of the
module that holds it all, the owner. Only owners that the plan needs are run and traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from loka.errors import LokaError
from loka.numerics.names import Fuse
from loka.plan.plan import NOTHING_AROUND, SitePlan, Skipped
from loka.policy.settings import SiteSettings
from loka.sites.refused import Refused
from loka.sites.regions import Scope, find_regions, inline_for
from loka.sites.site import Kind, Site
from loka.sites.straight import SiteCall, Statement, StraightForward

OUTSIDE = "its Parameter belongs to a module outside of the one that multiplies by it"
SEVERAL = "it stands for several calls of one Parameter, which cannot be told apart"


@dataclass(frozen=True, slots=True)
class Wish:
    """Sites that need the forward of their owner. Sites on Parameters whose regions are wanted are in both lists."""

    parameters: tuple[Site, ...] = ()  # on Parameters: without a rewritten forward they stay as they are
    fused: tuple[Site, ...] = ()  # their neighbours are to be taken along

    @property
    def sites(self) -> tuple[Site, ...]:
        """All of them, each once."""
        return tuple({site.name: site for site in (*self.parameters, *self.fused)}.values())

    def only(self, names: Container[str]) -> Wish:
        """The part of the wish that is for some sites."""
        return Wish(
            tuple(site for site in self.parameters if site.name in names),
            tuple(site for site in self.fused if site.name in names),
        )


# Trace an owner; sites in the forward that comes back are named as the owner calls them.
Trace = Callable[[Scope], "StraightForward | Refused"]


@dataclass(slots=True)
class Rewrites:
    """What came of the wishes. Sites are named as in the model, in forwards too."""

    forwards: dict[str, StraightForward] = field(default_factory=dict)  # by owner
    refused: dict[str, str] = field(default_factory=dict)  # site on a Parameter -> why it stays as it is
    skipped: list[Skipped] = field(default_factory=list)
    regions: dict[str, tuple[str, ...]] = field(default_factory=dict)  # site -> the operations of its region
    notes: dict[str, str] = field(default_factory=dict)  # site -> why its region is not replaced


def wish_of(plans: Sequence[SitePlan], settings: Sequence[SiteSettings]) -> Wish:
    """The sites of a plan that cannot be patched by a forward of their own, or shall not."""
    parameters, fused = [], []
    for plan, wanted in zip(plans, settings, strict=True):
        if plan.fp8 and plan.site.kind is not Kind.LINEAR:
            parameters.append(plan.site)
        if plan.fp8 and wanted.fuse is Fuse.ALWAYS:
            fused.append(plan.site)
    return Wish(tuple(parameters), tuple(fused))


def rewrite(wish: Wish, model: nn.Module, trace: Trace) -> Rewrites:
    """Trace the owners of the sites, and sort out what came back. Only the structure of `model` is read here."""
    made = Rewrites()
    outside = {site.name for site in wish.parameters if not _is_inside(site)}
    for owner in dict.fromkeys(site.owner for site in wish.parameters if site.name in outside):
        _refuse(wish.only({site.name for site in wish.sites if site.owner == owner} & outside), owner, OUTSIDE, made)
    _rewrite(wish.only({site.name for site in wish.sites} - outside), model, trace, made)
    return made


def _is_inside(site: Site) -> bool:
    return site.weight is not None and (not site.owner or site.weight.startswith(f"{site.owner}."))


def _rewrite(wish: Wish, model: nn.Module, trace: Trace, made: Rewrites) -> None:
    if not wish.sites:
        return
    covered: set[str] = set()
    for scope in inline_for(model, wish.sites):
        names = {f"{scope.owner}.{name}" if scope.owner else name for name in scope.sites}
        own = wish.only({site.name for site in wish.sites if site.name in names or site.weight in names})
        covered.update(site.name for site in own.sites)
        traced = trace(scope)
        if isinstance(traced, Refused):
            _retry(own, scope, traced.reason, model, trace, made)
        else:
            _take(own, scope, traced, made)
    made.notes.update((site.name, NOTHING_AROUND) for site in wish.fused if site.name not in covered)


def _retry(wish: Wish, scope: Scope, reason: str, model: nn.Module, trace: Trace, made: Rewrites) -> None:
    """Without the sites that the reason names, else without regions, else not at all."""
    named = {site.name for site in wish.parameters if reason.startswith(f"'{_relative(scope, site)}' ")}
    rest = {site.name for site in wish.sites} - named
    if named and rest:
        _refuse(wish.only(named), scope.owner, reason, made)
        _rewrite(wish.only(rest), model, trace, made)
    elif wish.fused and wish.parameters:
        _refuse(Wish(fused=wish.fused), scope.owner, reason, made)
        _rewrite(Wish(wish.parameters), model, trace, made)
    else:
        _refuse(wish, scope.owner, reason, made)


def _relative(scope: Scope, site: Site) -> str:
    """What the owner calls a site on a Parameter."""
    weight = site.weight or ""
    return weight.removeprefix(f"{scope.owner}.") if scope.owner else weight


def _refuse(wish: Wish, owner: str, reason: str, made: Rewrites) -> None:
    made.refused.update((site.name, reason) for site in wish.parameters)
    made.notes.update((site.name, reason) for site in wish.fused)
    share = sum(site.share for site in wish.parameters)
    for index, known in enumerate(made.skipped):
        if (known.owner, known.reason) == (owner, reason):
            made.skipped[index] = replace(known, share=known.share + share)
            return
    made.skipped.append(Skipped(owner, reason, share))


def _take(wish: Wish, scope: Scope, traced: StraightForward, made: Rewrites) -> None:
    """Keep a forward if it is worth it: for the sites on Parameters that it calls, or for a region."""
    fused = {site.name for site in wish.fused}
    relative = {_relative(scope, site) for site in wish.parameters if site.name in fused}
    relative |= {name for name in scope.sites if (f"{scope.owner}.{name}" if scope.owner else name) in fused}
    found = tuple(region for region in find_regions(traced, relative) if region.last > region.first)
    forward, lost = named_as_in_model(wish, scope, replace(traced, regions=found))
    for site in lost:
        made.refused[site.name] = SEVERAL
    regions = tuple(region for region in forward.regions if region.site in fused)
    made.regions.update((region.site, region.ops) for region in regions)
    around = {region.site for region in regions}
    made.notes.update((name, NOTHING_AROUND) for name in fused - around)
    if around or any(site not in lost for site in wish.parameters):
        made.forwards[scope.owner] = replace(forward, regions=regions)


def named_as_in_model(wish: Wish, scope: Scope, traced: StraightForward) -> tuple[StraightForward, tuple[Site, ...]]:
    """The forward with its sites named as in the model, and the sites on Parameters that no call could be given to.

    A Parameter that is used at several places makes several sites of one relative name: its calls are theirs in order.
    """
    sharing: dict[str, list[Site]] = {}
    for site in wish.parameters:
        sharing.setdefault(_relative(scope, site), []).append(site)
    calls = Counter(step.call.site for step in traced.statements if step.call is not None)
    lost = tuple(
        site
        for relative, sites in sharing.items()
        if len(sites) > 1 and calls[relative] != len(sites)
        for site in sites
    )
    unnamed = {site.name for site in lost}
    seen: Counter[str] = Counter()

    def named(step: Statement) -> Statement:
        if step.call is None:
            return step
        relative = step.call.site
        sites = sharing.get(relative)
        if sites is None:
            name = f"{scope.owner}.{relative}" if scope.owner else relative
        else:
            name = sites[min(seen[relative], len(sites) - 1)].name
            seen[relative] += 1
        return replace(step, call=None if name in unnamed else replace(step.call, site=name))

    statements = tuple(map(named, traced.statements))
    regions = tuple(
        replace(region, site=_call_in(statements, region.first, region.last).site)
        for region in traced.regions
        if any(step.call is not None for step in statements[region.first : region.last + 1])
    )
    return replace(traced, statements=statements, regions=regions), lost


def _call_in(statements: Sequence[Statement], first: int, last: int) -> SiteCall:
    for step in statements[first : last + 1]:
        if step.call is not None:
            return step.call
    raise LokaError("a region without a GEMM. This is a fault in LoKA: please report it.")


def with_regions(plans: Sequence[SitePlan], rewrites: Rewrites) -> tuple[SitePlan, ...]:
    """The plans with what came of their regions."""
    if not rewrites.regions and not rewrites.notes:
        return tuple(plans)
    return tuple(_with_region(plan, rewrites.regions, rewrites.notes) for plan in plans)


def _with_region(plan: SitePlan, regions: Mapping[str, tuple[str, ...]], notes: Mapping[str, str]) -> SitePlan:
    name = plan.site.name
    if not plan.fp8 or (name not in regions and name not in notes):
        return plan
    return replace(plan, region=regions.get(name, ()), region_note="" if name in regions else notes[name])
