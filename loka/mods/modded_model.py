"""The model of a policy with the policy's mods: what an entry of `mods` selects, its problems, and its changes.

All users of a policy's model build it here, so that plan, profile and training have the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from loka.errors import Code
from loka.model.build_model import BuiltModel, build_model
from loka.mods import mod_settings
from loka.mods.adaptation import Adaptation, Unchanged
from loka.mods.dataflow import Adaptable, analyse_dataflow
from loka.mods.protocols import ModMatch, ModRequest, ModuleMod
from loka.mods.registry import ModKind, module_mod, names_of
from loka.policy.cascade import hint
from loka.policy.mod_schema import own_parameters
from loka.policy.policy import ModRule, Pattern, Policy
from loka.policy.problems import PolicyError, Problem

THINGS = "module that it could change"
_SHOWN = 3  # reasons in one message, and names for one reason


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
    mods = {name: module_mod(name) for name in names_of(ModKind.MODULES)}
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
        seen = analyse_dataflow(built) if seen is None else seen
        found = mod.find(seen, selected(rule))
        named = named_problems(rule, found.unchanged)
        problems += named
        if not found.adaptations and not named:
            problems += idle_problems(rule, found.unchanged, _names(mod.find(seen, selection_of(rule, _everything))))
        for adaptation in found.adaptations:
            mod.change(built.module, adaptation)
            seen = None  # the data flow between linears may have changed
        applied.append(Applied(rule, found.adaptations, found.unchanged))
    if problems:
        raise PolicyError(problems)
    return Adapted(tuple(applied))


def _problems(rules: Sequence[ModRule], mods: Mapping[str, ModuleMod], model: Adaptable) -> list[Problem]:
    """Problems of entries before any is applied: patterns that match nothing, and conflicts."""
    problems: list[Problem] = []
    earlier: list[tuple[ModRule, tuple[str, ...]]] = []
    for rule in rules:
        mod = mods[rule.use]
        known = _names(mod.find(model, selection_of(rule, _everything)))

        def alive(pattern: Pattern, mod: ModuleMod = mod, rule: ModRule = rule) -> bool:
            # A name in `match` may be of something that the mod cannot change: named_problems reports that.
            named = None if pattern in rule.except_ else pattern.text
            return bool(_names(mod.find(model, selection_of(rule, pattern.matches, named))))

        problems += unmatched_problems(rule, known, THINGS, alive)
        changed = mod.find(model, selected(rule)).modules
        problems += conflicts(rule, changed, earlier)
        earlier.append((rule, changed))
    return problems


def _names(found: ModMatch) -> list[str]:
    """Names of everything that a mod has found, as patterns name it, including what it cannot change."""
    return list(dict.fromkeys((*(found.named or found.modules), *(unchanged.name for unchanged in found.unchanged))))


def _everything(_: str) -> bool:
    return True


def selected(rule: ModRule) -> ModRequest:
    """The request of an entry."""
    return ModRequest(rule.wants, rule.names, dict(rule.settings))


def selection_of(rule: ModRule, wants: Callable[[str], bool], name: str | None = None) -> ModRequest:
    """A request with the entry's parameters for other names; `name` is one named without a wildcard."""
    return ModRequest(wants, lambda other: other == name, dict(rule.settings))


def selected_for_all(mod: str) -> ModRequest:
    """A request for everything that a mod can change, with its default parameters."""
    schema = mod_settings.MOD_SCHEMAS[mod]
    defaults = {name: schema.model_fields[name].default for name in own_parameters(schema)}
    return ModRequest(
        lambda name: True, lambda name: False, {name: getattr(each, "value", each) for name, each in defaults.items()}
    )


def named_problems(rule: ModRule, unchanged: Sequence[Unchanged]) -> list[Problem]:
    """Problems for names without a wildcard that the mod cannot change."""
    return [
        Problem(
            pattern.place,
            f"{rule.use} cannot change {left.name!r}: {left.reason}; take it out of match",
            Code.MOD_REFUSED,
        )
        for left in unchanged
        if rule.names(left.name)
        for pattern in rule.match
        if pattern.text == left.name
    ]


def unmatched_problems(
    rule: ModRule, known: Sequence[str], things: str, alive: Callable[[Pattern], bool] | None = None
) -> list[Problem]:
    """Problems for patterns of an entry, including `except`, that match nothing; none if it is `optional`.

    `known` has all names, also for the closest one in the message, and `things` is their kind: "linear", "site".
    `alive` is true for a pattern that matches something, if that is not one of `known`.
    """
    if rule.optional:
        return []
    alive = alive or (lambda pattern: any(map(pattern.matches, known)))
    return [
        Problem(
            pattern.place,
            f"{pattern.text!r} matches no {things}; {hint(pattern, known, _nothing(rule))}, or set optional: true",
            Code.NO_MATCH,
        )
        for pattern in (*rule.match, *rule.except_)
        if not alive(pattern)
    ]


def idle_problems(rule: ModRule, unchanged: Sequence[Unchanged], known: Sequence[str]) -> list[Problem]:
    """Problem for an entry that changes nothing, although its patterns match something; none if it is `optional`."""
    if rule.optional:
        return []
    if not known:
        message = _nothing(rule)
    elif not unchanged:
        message = f"{rule.use} changes nothing: all that it matches is excepted; correct except"
    else:
        message = f"{rule.use} can change nothing of what it matches: {_reasons(unchanged)}; remove the mod"
    return [Problem(rule.place, f"{message}, or set optional: true", Code.MOD_IDLE)]


def conflicts(rule: ModRule, names: Iterable[str], earlier: Sequence[tuple[ModRule, Iterable[str]]]) -> list[Problem]:
    """A problem for each earlier entry of the same mod that also changes one of `names`; `earlier` has all changes."""
    wanted = list(dict.fromkeys(names))
    problems = []
    for other, taken in earlier:
        twice = set(taken) if other.use == rule.use else set()
        both = [name for name in wanted if name in twice]
        if both:
            already = f"{rule.use} changes it already ({other.source}, at {other.place})"
            names_in_both = _listed(tuple(map(repr, both)))
            problems.append(
                Problem(
                    rule.place,
                    f"{names_in_both}: {already}; leave it out of one of the two with except",
                    Code.MOD_TWICE,
                )
            )
    return problems


def _nothing(rule: ModRule) -> str:
    return f"the model has nothing that {rule.use} could change: remove the mod"


def _reasons(unchanged: Sequence[Unchanged]) -> str:
    """Each reason once, the most frequent first: `'a.0', 'a.1' and 3 more: it is larger than ...; 'b': ...`."""
    names: dict[str, dict[str, None]] = {}
    for each in unchanged:
        names.setdefault(each.reason, {})[repr(each.name) if each.name else "the model itself"] = None
    ordered = sorted(names.items(), key=lambda item: -len(item[1]))
    reasons = [f"{_listed(tuple(found))}: {reason}" for reason, found in ordered]
    rest = len(reasons) - _SHOWN
    return "; ".join(reasons[:_SHOWN]) + (f"; and {rest} more reason{'s' if rest > 1 else ''}" if rest > 0 else "")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
