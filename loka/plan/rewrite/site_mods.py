"""Applies the policy's mods that rewrite calls of sites: the result of each entry, and the resulting sites.

They are applied in the order of the registry, whatever the order in the policy, so that each can work on the result of
the previous one. An owner is traced to find changes; each change is applied and checked at once, so that a change that
does not keep the function is never planned. Interactions with their own kernels are found here too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter

from torch import nn

from loka.graph.ir import ForwardIR, Statement
from loka.graph.sites.flow import Flow
from loka.graph.sites.site import Site
from loka.graph.trace.tracer import Tracer
from loka.mods.adaptation import RewriteResult, Unchanged
from loka.mods.modded_model import conflicts, idle_problems, named_problems, unmatched_problems
from loka.mods.registry import INTERACTION_MOD, ModKind, names_of, site_mod
from loka.mods.rewriting.fuse_interaction import interacting
from loka.mods.rewriting.fused_interactions import CROSS, NOTHING, FusedInteractions, Interacting
from loka.mods.rewriting.rewriting_tracer import RewritingTracer
from loka.mods.rewriting.site_rewriting import ModelInChange
from loka.plan.format import format_us
from loka.plan.plan import InteractionPlan
from loka.plan.rewrite.owner_mods import ModOutcome, check_apart, owner_problems
from loka.policy.policy import ModRule
from loka.policy.problems import PolicyError, Problem
from loka.policy.settings import SiteSettings

FASTER = "faster"  # value of `where`: interactions in the modules where they are
WORTH = 1.05  # the speed-up from which they are: times are interpolated, and each bound module costs the host


@dataclass(frozen=True, slots=True)
class ModdedSites:
    """A model's sites and settings after mods have rewritten calls."""

    sites: tuple[Site, ...]
    settings: tuple[SiteSettings, ...]
    trace: RewritingTracer  # traces the model's owners, with all changes
    outcomes: Mapping[str, ModOutcome] = field(default_factory=dict)  # by the entry's `source`

    @property
    def changed(self) -> frozenset[str]:
        """Names of the sites that mods changed."""
        return frozenset(each.site for outcome in self.outcomes.values() for each in outcome.rewritten)


def with_site_mods(
    rules: Sequence[ModRule],
    sites: Sequence[Site],
    settings: Sequence[SiteSettings],
    siblings: Sequence[tuple[str, ...]],
    tracer: Tracer,
    reserved: frozenset[str],
) -> ModdedSites:
    """Apply the mods of sites in some entries of `mods`; `settings[i]` belongs to `sites[i]`.

    `siblings` are names of sites that seem to read one tensor (`SiteMap.siblings`), `reserved` those that interactions
    take. Owners are run and traced. Raises PolicyError with all problems of the entries.
    """
    order = names_of(ModKind.SITES)
    entries = [rule for rule in rules if rule.use in order]
    if not entries:
        return ModdedSites(tuple(sites), tuple(settings), RewritingTracer(tracer))
    model = ModelInChange(sites, settings, siblings, tracer, reserved)
    outcomes: dict[str, ModOutcome] = {}
    matchable: dict[str, tuple[str, ...]] = {}  # the names that an entry's patterns may match
    for rule in sorted(entries, key=lambda rule: order.index(rule.use)):
        names = (name for site in model.sites.values() for name in (*site.members, site.name))
        matchable[rule.source] = tuple(names)
        outcome = site_mod(rule.use).rewrite_sites(model, rule)
        outcomes[rule.source] = ModOutcome(tuple(outcome.rewritten), outcome.unchanged)
    _check(entries, outcomes, matchable)
    return ModdedSites(tuple(model.sites.values()), tuple(model.settings.values()), model.trace, outcomes)


def _check(
    rules: Sequence[ModRule], outcomes: Mapping[str, ModOutcome], matchable: Mapping[str, tuple[str, ...]]
) -> None:
    """Raise PolicyError for problems of entries; `outcomes` and `matchable` names are by the entries' `source`.

    These are a named site that cannot be changed, a pattern that matches no site, a site that two entries of one mod
    match, and an entry that changes nothing.
    """
    problems: list[Problem] = []
    earlier: list[tuple[ModRule, tuple[str, ...]]] = []
    for rule in rules:
        outcome, names = outcomes[rule.source], matchable[rule.source]
        changed = tuple(site for each in outcome.rewritten for site in each.sites)
        wrong = named_problems(rule, outcome.unchanged)
        wrong += unmatched_problems(rule, names, "site")
        wrong += conflicts(rule, [name for _, others in earlier for name in others if rule.wants(name)], earlier)
        if not changed and not wrong:
            wrong = idle_problems(rule, outcome.unchanged, [name for name in names if rule.wants(name)])
        problems += wrong
        earlier.append((rule, changed))
    if problems:
        raise PolicyError(problems)


def requested_interactions(
    rules: Sequence[ModRule], sites: Sequence[Site], model: nn.Module, flow: Flow, slower: Collection[str] = ()
) -> Interacting:
    """Where interactions are to be fused, but for the modules `slower`. Raises PolicyError if two entries match one
    module, naming both.
    """
    entries = _entries(rules)

    def wants(name: str) -> bool:
        return name not in slower and any(rule.wants(name) for rule in entries)

    found = interacting(sites, model, wants, flow)
    check_apart([(rule, [owner for owner in sorted(found.owners) if rule.wants(owner)]) for rule in entries])
    return found


def interaction_outcomes(
    rules: Sequence[ModRule], model: nn.Module, found: FusedInteractions, crossing: Sequence[str]
) -> dict[str, ModOutcome]:
    """The result of each entry, by its `source`. `crossing` are modules with cross layers, which are no mistake.

    Raises PolicyError for entries without any fused interaction, and for modules that they name and that are not
    changed.
    """
    outcomes: dict[str, ModOutcome] = {}
    problems: list[Problem] = []
    for rule in _entries(rules):
        fused = [each for each in found.fused if rule.wants(each.owner)]
        crosses = [owner for owner in crossing if rule.wants(owner) and owner not in found.reasons]
        reasons = {**found.reasons, **dict.fromkeys(crosses, CROSS)}
        left = tuple(Unchanged(owner, reason) for owner, reason in reasons.items() if rule.wants(owner))
        rewritten = tuple(RewriteResult(rule.use, each.owner, each.sites, "", each.what) for each in fused)
        outcomes[rule.source] = ModOutcome(rewritten, left)
        # Without a sign of an interaction, a module is no news unless the entry is about it.
        others = tuple(Unchanged(owner, reason) for owner, reason in found.untraced.items() if rule.wants(owner))
        changed = {*crosses, *(each.owner for each in fused)}
        if _where(rule) == FASTER:  # it may be faster nowhere
            rule = replace(rule, optional=True)
        problems += owner_problems(rule, changed, (*left, *others), model, NOTHING)
    if problems:
        raise PolicyError(problems)
    return outcomes


def slower_interactions(rules: Sequence[ModRule], interactions: Sequence[InteractionPlan]) -> dict[str, str]:
    """The modules that `where: faster` leaves to torch.compile, with reasons: LoKA's kernels gain too little there.

    A module whose times are not all known stays where the policy asks for it, and is left where it does not.
    """
    asked = any(rule.asked for rule in _entries(rules))
    found = {}
    for owner, own in groupby(sorted(interactions, key=attrgetter("owner")), key=attrgetter("owner")):
        if not open_interactions(rules, [owner]):
            continue
        times = [(each.calls, each.chosen, each.as_is) for each in own]
        ours = sum(calls * chosen.us for calls, chosen, _ in times if chosen is not None)
        theirs = sum(calls * as_is.us for calls, _, as_is in times if as_is is not None)
        known = all(chosen is not None and as_is is not None for _, chosen, as_is in times)
        if not known and not asked:
            found[owner] = "its times are not all measured, and no entry of mods asks for it"
        elif known and theirs < WORTH * ours:
            word = "faster here" if theirs < ours else f"as fast here, to a factor of {WORTH:g}"
            found[owner] = f"torch.compile is {word}: {format_us(theirs)}, with kernels of LoKA {format_us(ours)}"
    return found


def open_interactions(rules: Sequence[ModRule], owners: Collection[str]) -> tuple[str, ...]:
    """The modules among `owners` that are asked for `where: faster`, sorted."""
    entries = [rule for rule in _entries(rules) if _where(rule) == FASTER]
    return tuple(owner for owner in sorted(owners) if any(rule.wants(owner) for rule in entries))


def _where(rule: ModRule) -> object:
    return dict(rule.settings)["where"]


def _entries(rules: Sequence[ModRule]) -> tuple[ModRule, ...]:
    return tuple(rule for rule in rules if rule.use == INTERACTION_MOD)


def weight_of(site: Site) -> str | None:
    """Name of the Parameter that a site multiplies by; merged sites use the site's name."""
    return site.name if site.members else site.weight


def called_by_owner(site: Site, owner: str) -> str:
    """Name of a site on a Parameter relative to the owner."""
    weight = weight_of(site) or ""
    return weight.removeprefix(f"{owner}.") if owner else weight


def named_as_in_model(parameters: Sequence[Site], owner: str, traced: ForwardIR) -> tuple[ForwardIR, tuple[Site, ...]]:
    """An owner's forward with its sites named as in the model, and the sites of `parameters` without a call.

    A Parameter used in several places makes several sites with one relative name, which its calls get in order.
    """
    sharing: dict[str, list[Site]] = {}
    for site in parameters:
        sharing.setdefault(called_by_owner(site, owner), []).append(site)
    calls = Counter(step.call.site for step in traced.statements if step.call is not None)
    lost = tuple(
        site
        for relative, sites in sharing.items()
        if len(sites) > 1 and calls[relative] != len(sites)
        for site in sites
    )
    unnamed = {site.name for site in lost}

    def named(steps: Sequence[Statement]) -> Iterator[Statement]:
        seen: Counter[str] = Counter()
        for step in steps:
            if step.call is None:
                yield step
                continue
            relative = step.call.site
            sites = sharing.get(relative)
            name = f"{owner}.{relative}" if owner else relative
            if sites is not None:
                name = sites[min(seen[relative], len(sites) - 1)].name
                seen[relative] += 1
            yield replace(step, call=None if name in unnamed else replace(step.call, site=name))

    statements = tuple(named(traced.statements))
    within = [statements[region.first : region.last + 1] for region in traced.regions]
    regions = tuple(
        replace(region, site=calls_in[0].site)
        for region, steps in zip(traced.regions, within, strict=True)
        if (calls_in := [step.call for step in steps if step.call is not None])
    )
    return replace(traced, statements=statements, regions=regions), lost
