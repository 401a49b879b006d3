"""Mods that cannot both change one thing: each of the two is named with its line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loka.policy.policy import ModRule
from loka.policy.problems import Problem, problem

# Pairs that exclude each other on one thing, and why.
EXCLUDED: dict[frozenset[str], str] = {}
_SHOWN = 3  # names that one message tells


def conflicts(rule: ModRule, names: Iterable[str], earlier: Sequence[tuple[ModRule, Iterable[str]]]) -> list[Problem]:
    """A problem for each earlier entry that changes one of `names` too and cannot, with what that one changes."""
    wanted = list(dict.fromkeys(names))
    problems = []
    for other, taken in earlier:
        why = _why(rule, other)
        both = sorted(set(taken).intersection(wanted), key=wanted.index) if why else []
        if both:
            shown = ", ".join(map(repr, both[:_SHOWN])) + (f" and {len(both) - _SHOWN} more" if both[_SHOWN:] else "")
            advice = "leave it out of one of the two with except"
            problems.append(problem(rule.place, f"{shown}: {why} ({other.source}, at {other.place}); {advice}"))
    return problems


def _why(rule: ModRule, other: ModRule) -> str:
    if rule.use == other.use:
        return f"{rule.use} changes it already"
    reason = EXCLUDED.get(frozenset((rule.use, other.use)))
    return f"{rule.use} and {other.use} exclude each other there, as {reason}" if reason else ""
