"""What is wrong with entries of `mods` that are matched over owners: `fuse_interaction`, `residual_high_precision`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from loka.mods.adaptation import Unchanged
from loka.mods.conflicts import conflicts
from loka.mods.fuse_interaction import NAME, Interacting, interacting
from loka.mods.selection import idle_problems, named_problems, unmatched_problems
from loka.plan.rewrite.fused_interactions import NOTHING, FusedInteractions
from loka.policy.policy import ModRule, Policy
from loka.policy.problems import PolicyError, Problem
from loka.sites.site import GemmKind, Site


def rules_of(policy: Policy, use: str) -> tuple[ModRule, ...]:
    """A policy's entries for one mod."""
    return tuple(rule for rule in policy.mods if rule.use == use)


def interactions_asked(policy: Policy, sites: tuple[Site, ...], model: nn.Module) -> Interacting:
    """Where interactions are to be fused. Raises PolicyError where two entries ask for one module, naming both."""
    rules = rules_of(policy, NAME)
    found = interacting(sites, model, lambda name: any(rule.wants(name) for rule in rules))
    check_apart([(rule, [owner for owner in sorted(found.owners) if rule.wants(owner)]) for rule in rules])
    return found


def mixing_sites(asked: Interacting, sites: Sequence[Site]) -> frozenset[str]:
    """Names of the matmuls that may be a mixing layer's and are to be fused: no other mod may write them otherwise.

    A mixing layer of n embeddings of d, rank r, has `x^T @ rank`, d rows a sample, K = n, N = r; `x @` that, n rows,
    K = d, N = r; and perhaps `compress @ x`, which has as many rows and the K of the first.
    """
    matmuls = [site for site in asked.sites if site.kind is GemmKind.MATMUL]
    products = {(each.owner, each.rows.per_sample, each.k, each.n) for each in sites if each.weight is None}
    ranks = [each for each in matmuls if (each.owner, each.k, each.rows.per_sample, each.n) in products]
    mixed = {(rank.owner, rank.rows, rank.k) for rank in ranks}
    return frozenset(site.name for site in matmuls if (site.owner, site.rows, site.k) in mixed)


def check_interactions(policy: Policy, model: nn.Module, made: FusedInteractions) -> None:
    """Raises PolicyError for entries that nothing is fused for, and for modules that they name and that stay."""
    problems: list[Problem] = []
    for rule in rules_of(policy, NAME):
        changed = {each.owner for each in made.fused if rule.wants(each.owner)}
        left = [Unchanged(owner, reason) for owner, reason in made.reasons.items() if rule.wants(owner)]
        problems += owner_problems(rule, changed, left, model, NOTHING)
    if problems:
        raise PolicyError(problems)


def check_apart(asked: Sequence[tuple[ModRule, Iterable[str]]]) -> None:
    """Raises PolicyError where two entries of one mod ask for one module; `asked` are entries with their modules."""
    problems = [
        each
        for place, (rule, names) in enumerate(asked)
        for earlier, others in asked[:place]
        for each in conflicts(rule, names, [(earlier, others)])
    ]
    if problems:
        raise PolicyError(problems)


def owner_problems(
    rule: ModRule, changed: Collection[str], left: Sequence[Unchanged], model: nn.Module, reason: str
) -> list[Problem]:
    """Patterns that match no module, modules that they name and that stay, and an entry that changes nothing.

    `changed` are the modules that it changes, `left` those that it does not, or not wholly, and why; `reason` is why
    any other module stays.
    """
    modules = [name for name, _ in model.named_modules()]
    told = {each.name for each in left}
    stay = [each for each in left if each.name not in changed]
    stay += [Unchanged(name, reason) for name in modules if rule.names(name) and name not in {*changed, *told}]
    problems = unmatched_problems(rule, lambda pattern: any(map(pattern.matches, modules)), modules[1:], "module")
    problems += named_problems(rule, stay)
    if problems or changed:
        return problems
    if not stay and rule.match:
        stay = [Unchanged(name, reason) for name in modules if rule.wants(name)][:1]
    return idle_problems(rule, stay, [each.name for each in stay])
