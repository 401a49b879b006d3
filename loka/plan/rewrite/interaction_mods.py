"""The policy's entries for interactions with their own kernels: where to look, and the result of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from loka.mods.adaptation import RewriteResult, Unchanged
from loka.mods.registry import interaction_planning
from loka.mods.rewriting.interactions import FusedInteractions, Interacting
from loka.plan.rewrite.owner_mods import check_apart, owner_problems
from loka.policy.policy import ModRule
from loka.policy.problems import PolicyError, Problem
from loka.sites.site import Site


@dataclass(frozen=True, slots=True)
class EntryInteractions:
    """Interactions fused for one entry, and the modules that are not changed, with reasons."""

    rewritten: tuple[RewriteResult, ...]
    unchanged: tuple[Unchanged, ...]


def requested_interactions(rules: Sequence[ModRule], sites: Sequence[Site], model: nn.Module) -> Interacting:
    """Where interactions are to be fused. Raises PolicyError if two entries match one module, naming both."""
    entries = _entries(rules)
    found = interaction_planning().interacting(sites, model, lambda name: any(rule.wants(name) for rule in entries))
    check_apart([(rule, [owner for owner in sorted(found.owners) if rule.wants(owner)]) for rule in entries])
    return found


def interaction_outcomes(
    rules: Sequence[ModRule], model: nn.Module, found: FusedInteractions
) -> dict[str, EntryInteractions]:
    """The result of each entry, by its `source`.

    Raises PolicyError for entries without any fused interaction, and for modules that they name and that are not
    changed.
    """
    outcomes: dict[str, EntryInteractions] = {}
    problems: list[Problem] = []
    for rule in _entries(rules):
        fused = [each for each in found.fused if rule.wants(each.owner)]
        left = tuple(Unchanged(owner, reason) for owner, reason in found.reasons.items() if rule.wants(owner))
        rewritten = tuple(RewriteResult(rule.use, each.owner, each.sites, "", each.what) for each in fused)
        outcomes[rule.source] = EntryInteractions(rewritten, left)
        problems += owner_problems(rule, {each.owner for each in fused}, left, model, interaction_planning().nothing)
    if problems:
        raise PolicyError(problems)
    return outcomes


def _entries(rules: Sequence[ModRule]) -> tuple[ModRule, ...]:
    return tuple(rule for rule in rules if rule.use == interaction_planning().name)
