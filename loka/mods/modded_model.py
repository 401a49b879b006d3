"""Builds the model of a policy and applies the policy's mods.

All users of a policy's model build it here, so that plan, profile and training have the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from loka.mods.adaptation import Adaptation, Unchanged
from loka.mods.dataflow import Adaptable, analyse_dataflow
from loka.mods.mod_planning import ModMatch, ModuleModPlanning
from loka.mods.registry import ModKind, module_mod, module_planning, names_of
from loka.mods.selection import conflicts, idle_problems, named_problems, selected, selection_of, unmatched_problems
from loka.policy.policy import ModRule, Pattern, Policy
from loka.policy.problems import PolicyError, Problem
from loka.sites.build_model import BuiltModel, build_model

THINGS = "module that it could change"


@dataclass(frozen=True, slots=True)
class Applied:
    """Changes that one entry of a policy's `mods` made to the model's modules, and the ones it could not make."""

    rule: ModRule
    adaptations: tuple[Adaptation, ...]
    unchanged: tuple[Unchanged, ...]


@dataclass(frozen=True, slots=True)
class Adapted:
    """Changes of all of a policy's module mods, in order."""

    applied: tuple[Applied, ...] = ()

    @property
    def adaptations(self) -> tuple[Adaptation, ...]:
        """In order; an adaptation may rely on those of earlier mods."""
        return tuple(adaptation for applied in self.applied for adaptation in applied.adaptations)


def built_model(policy: Policy) -> tuple[BuiltModel, Adapted]:
    """The model of a policy with its mods applied, and their changes.

    Raises InputError as `build_model` does, and PolicyError as `adapted` does.
    """
    built = model_without_mods(policy)
    return built, adapted(built, policy.mods)


def model_without_mods(policy: Policy, module: nn.Module | None = None) -> BuiltModel:
    """The model of a policy as its factory makes it, or has made it. Raises InputError as `build_model` does."""
    spec = policy.model
    return build_model(spec.factory, spec.inputs, spec.batch_size, batches=spec.batches, module=module)


def adapted(
    built: BuiltModel,
    rules: Sequence[ModRule],
    look: Callable[[BuiltModel], Adaptable] = analyse_dataflow,
) -> Adapted:
    """Apply the module mods in some entries of `mods` to a built model in place, one after the other.

    Raises PolicyError with all problems and their positions: a pattern that matches nothing, an entry that changes
    nothing, a module that an entry names and cannot change, one that two entries change. If an entry is wrong before
    the first change, the model is unchanged; otherwise it must not be used any more.
    """
    mods = {name: module_planning(name) for name in names_of(ModKind.MODULES)}
    entries = [rule for rule in rules if rule.use in mods]
    if not entries:
        return Adapted()
    first = look(built)
    problems = _problems(entries, mods, first)
    if problems:
        raise PolicyError(problems)
    applied: list[Applied] = []
    seen: Adaptable | None = first
    for rule in entries:
        mod = mods[rule.use]
        seen = look(built) if seen is None else seen
        found = mod.find(seen, selected(rule))
        named = named_problems(rule, found.unchanged)
        problems += named
        if not found.adaptations and not named:
            problems += idle_problems(rule, found.unchanged, _names(mod.find(seen, selection_of(rule, _everything))))
        for adaptation in found.adaptations:
            module_mod(rule.use).change(built.module, adaptation)
            seen = None  # the data flow between linears may have changed
        applied.append(Applied(rule, found.adaptations, found.unchanged))
    if problems:
        raise PolicyError(problems)
    return Adapted(tuple(applied))


def _problems(rules: Sequence[ModRule], mods: Mapping[str, ModuleModPlanning], model: Adaptable) -> list[Problem]:
    """Problems of entries before any is applied: patterns that match nothing, and conflicts."""
    problems: list[Problem] = []
    earlier: list[tuple[ModRule, list[str]]] = []
    for rule in rules:
        mod = mods[rule.use]
        known = _names(mod.find(model, selection_of(rule, _everything)))

        def alive(pattern: Pattern, mod: ModuleModPlanning = mod, rule: ModRule = rule) -> bool:
            # A name in `match` may be of something that the mod cannot change: named_problems reports that.
            named = None if pattern in rule.except_ else pattern.text
            return bool(_names(mod.find(model, selection_of(rule, pattern.matches, named))))

        problems += unmatched_problems(rule, alive, known, THINGS)
        changed = [name for each in mod.find(model, selected(rule)).adaptations for name in each.modules]
        problems += conflicts(rule, changed, earlier)
        earlier.append((rule, changed))
    return problems


def _names(found: ModMatch) -> list[str]:
    """Names of everything that a mod has found, as patterns name it, including what it cannot change."""
    changed = found.named or [name for adaptation in found.adaptations for name in adaptation.modules]
    return list(dict.fromkeys((*changed, *(unchanged.name for unchanged in found.unchanged))))


def _everything(_: str) -> bool:
    return True
