"""What a policy's `fuse_interaction` asks of a model, and what is wrong where it gets nothing."""

from __future__ import annotations

import difflib

from torch import nn

from loka.errors import InputError
from loka.mods.fuse_interaction import NAME, Interacting, interacting
from loka.plan.interactions import Interactions
from loka.policy.policy import ModRule, Policy
from loka.sites.site import Kind, Site


def interactions_asked(policy: Policy, sites: tuple[Site, ...], model: nn.Module) -> Interacting:
    """Where interactions are to be fused. Raises InputError where two entries ask for one module, naming both."""
    rules = rules_of(policy, NAME)
    found = interacting(sites, model, lambda name: any(rule.wants(name) for rule in rules))
    for owner in sorted(found.owners):
        wanting = [rule for rule in rules if rule.wants(owner)]
        if len(wanting) > 1:
            raise InputError(
                f"{wanting[1].place}: {wanting[1].source} asks for {shown(owner)}, and so does {wanting[0].source} at "
                f"{wanting[0].place}: leave one of them out, or narrow its match"
            )
    return found


def mixing_sites(policy: Policy, sites: tuple[Site, ...], model: nn.Module) -> frozenset[str]:
    """Names of the matmuls that may be a mixing layer's and are to be fused: no other mod may write them otherwise."""
    return frozenset(site.name for site in interactions_asked(policy, sites, model).sites if site.kind is Kind.MATMUL)


def check_interactions(policy: Policy, model: nn.Module, made: Interactions) -> None:
    """Raises InputError for an entry that nothing is fused for, and for a module that it names and that has nothing."""
    for rule in rules_of(policy, NAME):
        fused = {each.owner for each in made.fused if rule.wants(each.owner)}
        named = [owner for owner in made.reasons if rule.names(owner) and owner not in fused]
        if named:
            raise InputError(f"{rule.place}: {rule.source} cannot fuse {shown(named[0])}: {made.reasons[named[0]]}")
        if not fused and not rule.optional:
            raise InputError(f"{rule.place}: {rule.source} fuses nothing: {_why(rule, model, made)}")


def rules_of(policy: Policy, use: str) -> tuple[ModRule, ...]:
    """A policy's entries for one mod."""
    return tuple(rule for rule in policy.mods if rule.use == use)


def unmatched(rule: ModRule, model: nn.Module) -> str | None:
    """What is wrong with a mod's match where it matches no module; None where it matches one."""
    names = [name for name, _ in model.named_modules()]
    if any(rule.wants(name) for name in names):
        return None
    text = rule.match[0].text if rule.match else ""
    near = difflib.get_close_matches(text, names, n=3, cutoff=0.5)
    hint = f"; near it are {', '.join(near)}" if near else ""
    return f"no module is called {text!r}{hint}"


def shown(owner: str) -> str:
    """A module's name for people."""
    return f"'{owner}'" if owner else "the model"


def _why(rule: ModRule, model: nn.Module, made: Interactions) -> str:
    missing = unmatched(rule, model)
    if missing is not None:
        return missing
    reasons = {owner: reason for owner, reason in made.reasons.items() if rule.wants(owner)}
    if not reasons:
        return "nothing that it matches mixes, joins or crosses features; leave it out, or say `optional: true`"
    owner, reason = next(iter(reasons.items()))
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return f"{shown(owner)}: {reason}{more}"
