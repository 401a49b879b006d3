"""The selection of an entry of a policy's `mods`, and problems where nothing, or not all of it, can be changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from loka.mods.adaptation import Unchanged
from loka.mods.mod_planning import ModPlanning, ModRequest
from loka.policy.cascade import hint
from loka.policy.mod_schema import own_parameters
from loka.policy.policy import ModRule, Pattern
from loka.policy.problems import Problem, problem

_SHOWN = 3  # reasons in one message, and names for one reason


def selected(rule: ModRule) -> ModRequest:
    """The request of an entry."""
    return ModRequest(rule.wants, rule.names, dict(rule.settings))


def selection_of(rule: ModRule, wants: Callable[[str], bool], name: str | None = None) -> ModRequest:
    """A request with the entry's parameters for other names; `name` is one named without a wildcard."""
    return ModRequest(wants, lambda other: other == name, dict(rule.settings))


def selected_for_all(mod: ModPlanning) -> ModRequest:
    """A request for everything that a mod can change, with its default parameters."""
    fields = mod.setting.model_fields
    defaults = {name: fields[name].default for name in own_parameters(mod.setting)}
    return ModRequest(
        lambda name: True, lambda name: False, {name: getattr(each, "value", each) for name, each in defaults.items()}
    )


def named_problems(rule: ModRule, unchanged: Sequence[Unchanged]) -> list[Problem]:
    """Problems for names without a wildcard that the mod cannot change."""
    return [
        problem(pattern.place, f"{rule.use} cannot change {left.name!r}: {left.reason}; take it out of match")
        for left in unchanged
        if rule.names(left.name)
        for pattern in rule.match
        if pattern.text == left.name
    ]


def unmatched_problems(
    rule: ModRule, alive: Callable[[Pattern], bool], known: Sequence[str], things: str
) -> list[Problem]:
    """Problems for patterns of an entry, including `except`, that match nothing; none if it is `optional`.

    `alive` is true for a pattern that matches something, `known` has all names, for the closest one in the message, and
    `things` is their kind: "linear", "site".
    """
    if rule.optional:
        return []
    return [
        problem(
            pattern.place,
            f"{pattern.text!r} matches no {things}; {hint(pattern, known, _nothing(rule))}, or set optional: true",
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
    return [problem(rule.place, f"{message}, or set optional: true")]


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
                problem(rule.place, f"{names_in_both}: {already}; leave it out of one of the two with except")
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
