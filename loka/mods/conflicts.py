"""A mod that two entries of a policy ask for on one thing: both are named with their lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loka.policy.policy import ModRule
from loka.policy.problems import Problem, problem

_SHOWN = 3  # names that one message tells


def conflicts(rule: ModRule, names: Iterable[str], earlier: Sequence[tuple[ModRule, Iterable[str]]]) -> list[Problem]:
    """A problem for each earlier entry of the same mod that changes one of `names` too, with what that one changes."""
    wanted = list(dict.fromkeys(names))
    problems = []
    for other, taken in earlier:
        both = sorted(set(taken).intersection(wanted), key=wanted.index) if other.use == rule.use else []
        if both:
            shown = ", ".join(map(repr, both[:_SHOWN])) + (f" and {len(both) - _SHOWN} more" if both[_SHOWN:] else "")
            already = f"{rule.use} changes it already ({other.source}, at {other.place})"
            problems.append(problem(rule.place, f"{shown}: {already}; leave it out of one of the two with except"))
    return problems
