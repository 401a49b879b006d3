"""What the language has and this version refuses, in one table: an entry is deleted when the thing arrives."""

from __future__ import annotations

from loka.policy.problems import Problem, problem
from loka.policy.tree import Mapping, Sequence

# Top-level key: what to do until then.
REFUSED_KEYS = {
    "mods": "remove them, or make the change in the model",
}


def unavailable(what: str, advice: str) -> str:
    """The message for something that is in the language but not in this version."""
    return f"{what} is not available in this version: {advice}"


STATIC_WITHOUT_AMAX = (
    "range: static needs a maximum: give amax, name a profile to take it from (loka probe), or use range: dynamic"
)


def unsupported_keys(root: Mapping) -> list[Problem]:
    """A problem for each refused key of the top level; an empty `mods` asks for nothing."""
    problems = []
    for key, advice in REFUSED_KEYS.items():
        entry = root.entries.get(key)
        if entry is None or entry.node.reported or (isinstance(entry.node, Sequence) and not entry.node.items):
            continue
        problems.append(problem(entry.key, unavailable(key, advice)))
    return problems
