"""Applies the policy's mods that rewrite calls of sites: the result of each entry, and the resulting sites.

They are applied in the order of the registry, whatever the order in the policy, so that each can work on the result of
the previous one. An owner is traced to find changes; each change is applied and checked at once, so that a change that
does not keep the function is never planned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from loka.graph.trace.tracer import Tracer
from loka.mods.adaptation import RewriteResult, Unchanged
from loka.mods.registry import ModKind, names_of, site_planning
from loka.mods.rewriting.interactions import Reserved
from loka.mods.rewriting.model_in_change import ModelInChange
from loka.mods.rewriting.rewriting_tracer import RewritingTracer
from loka.mods.selection import conflicts, idle_problems, named_problems, unmatched_problems
from loka.policy.cascade.settings import SiteSettings
from loka.policy.policy import ModRule, Pattern
from loka.policy.problems import PolicyError, Problem
from loka.sites.site import Site


@dataclass(frozen=True, slots=True)
class RewrittenSites:
    """Changes that one entry of the policy's `mods` made to forwards, and requested ones that it did not make."""

    rewritten: tuple[RewriteResult, ...] = ()
    unchanged: tuple[Unchanged, ...] = ()
    known: tuple[str, ...] = ()  # names of all sites that it could match


@dataclass(frozen=True, slots=True)
class ModdedSites:
    """A model's sites and settings after mods have rewritten calls."""

    sites: tuple[Site, ...]
    settings: tuple[SiteSettings, ...]
    trace: RewritingTracer  # traces the model's owners, with all changes
    outcomes: Mapping[str, RewrittenSites] = field(default_factory=dict)  # by the entry's `source`

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
    reserved: Reserved,
) -> ModdedSites:
    """Apply the mods of sites in some entries of `mods`; `settings[i]` belongs to `sites[i]`.

    `siblings` are names of sites that seem to read one tensor (`SiteMap.siblings`), `reserved` those that another mod
    needs unchanged. Owners are run and traced. Raises PolicyError with all problems of the entries.
    """
    order = names_of(ModKind.SITES)
    entries = [rule for rule in rules if rule.use in order]
    if not entries:
        return ModdedSites(tuple(sites), tuple(settings), RewritingTracer(tracer))
    model = ModelInChange(sites, settings, siblings, tracer, reserved)
    outcomes: dict[str, RewrittenSites] = {}
    for rule in sorted(entries, key=lambda rule: order.index(rule.use)):
        known = tuple(name for site in model.sites.values() for name in (*site.members, site.name))
        outcome = site_planning(rule.use).rewrite_sites(model, rule)
        outcomes[rule.source] = RewrittenSites(tuple(outcome.rewritten), outcome.unchanged, known)
    _check(entries, outcomes)
    return ModdedSites(tuple(model.sites.values()), tuple(model.settings.values()), model.trace, outcomes)


def _check(rules: Sequence[ModRule], outcomes: Mapping[str, RewrittenSites]) -> None:
    """Raise PolicyError for problems of entries; `outcomes` are by the entries' `source`.

    These are a named site that cannot be changed, a pattern that matches no site, a site that two entries of one mod
    match, and an entry that changes nothing.
    """
    problems: list[Problem] = []
    earlier: list[tuple[ModRule, tuple[str, ...]]] = []
    for rule in rules:
        outcome = outcomes[rule.source]
        changed = tuple(site for each in outcome.rewritten for site in each.sites)
        wrong = named_problems(rule, outcome.unchanged)
        wrong += unmatched_problems(rule, _alive_among(outcome.known), outcome.known, "site")
        alike = [(other, names) for other, names in earlier if other.use == rule.use]
        both = [name for _, names in alike for name in names if rule.wants(name)]
        wrong += conflicts(rule, both, alike)
        if not changed and not wrong:
            wrong = idle_problems(rule, outcome.unchanged, [name for name in outcome.known if rule.wants(name)])
        problems += wrong
        earlier.append((rule, changed))
    if problems:
        raise PolicyError(problems)


def _alive_among(known: Sequence[str]) -> Callable[[Pattern], bool]:
    return lambda pattern: any(map(pattern.matches, known))
