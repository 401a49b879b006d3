"""The modules that `fully_shard` wraps one by one, by a policy's `units`: no forward that is rewritten crosses one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import nn

from loka.errors import Code
from loka.graph.patterns.owners import parents
from loka.plan.plan import PlannedBinding
from loka.policy.cascade import hint
from loka.policy.policy import Pattern, Policy
from loka.policy.problems import PolicyError, Problem


def units_of(policy: Policy, model: nn.Module) -> frozenset[str]:
    """Qualified names of the units: for each pattern the outermost modules that it matches.

    So `layers.*` is each layer, without what is in it. Raises PolicyError for a pattern that matches no module.
    """
    names = [name for name, _ in model.named_modules() if name]
    found: set[str] = set()
    problems = []
    for pattern in policy.units:
        matched = {name for name in names if pattern.matches(name)}
        found |= {name for name in matched if matched.isdisjoint(parents(name))}
        if not matched:
            advice = hint(pattern, names, "the model has no modules")
            problems.append(Problem(pattern.place, f"{pattern.text!r} matches no module; {advice}", Code.NO_MATCH))
    if problems:
        raise PolicyError(problems)
    return frozenset(found)


def within_units(groups: Iterable[tuple[str, ...]], units: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Groups of sites, divided so that the sites of each are in the same unit."""
    divided: dict[tuple[int, str], list[str]] = {}
    for number, group in enumerate(groups):
        for site in group:
            unit = next((name for name in (site, *parents(site)) if name in units), "")
            divided.setdefault((number, unit), []).append(site)
    return tuple(tuple(group) for group in divided.values() if len(group) > 1)


def check_units(policy: Policy, bindings: Sequence[PlannedBinding], units: Collection[str]) -> None:
    """Raise PolicyError for a unit whose forward became a part of another, which only a mod of the policy brings about.

    Without units nothing is checked.
    """
    for binding in bindings if units else ():
        for module in binding.modules if binding.forward is not None else ():
            inlined = binding.forward.inlined if binding.forward is not None else ()
            names = (f"{module}.{child}" if module else child for child in inlined)
            if unit := next((name for name in names if name in units), None):
                pattern: Pattern = next(each for each in policy.units if each.matches(unit))
                message = (
                    f"{unit!r} is a unit, and mods make its forward a part of that of {module or 'the model'!r}: "
                    "except its sites from the mods, or name the module around it"
                )
                raise PolicyError([Problem(pattern.place, message, Code.UNIT)])
