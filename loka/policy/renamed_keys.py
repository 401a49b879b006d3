"""Renamed keys of a policy: an old name is accepted wherever the new one is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from loka.policy.problems import Place, Problem, problem
from loka.policy.tree import Entry, Mapping, Node, Sequence

OLD, NEW = "turned", "requantize_transpose"
# Mappings below `defaults` or a rule that may contain the key; () is the setting of the site itself.
_SETTINGS = ((), ("dgrad",), ("wgrad",), ("dgrad", "weight"), ("wgrad", "grad_output"), ("wgrad", "input"))


@dataclass(frozen=True, slots=True)
class RenamedKey:
    """A key under its old name."""

    place: Place
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.place}: {self.old} is called {self.new} now; the old name still works"


@dataclass(frozen=True, slots=True)
class CurrentKeys:
    """A tree with current names, the old names that it had, and problems where both names are given."""

    tree: Mapping
    renamed: tuple[RenamedKey, ...]
    problems: tuple[Problem, ...]


def with_current_keys(tree: Mapping) -> CurrentKeys:
    """One document of a policy with current names, before it is merged with its base."""
    renamed: list[RenamedKey] = []
    problems: list[Problem] = []
    entries = dict(tree.entries)
    if "defaults" in entries:
        entries["defaults"] = _entry(entries["defaults"], renamed, problems)
    rules = entries.get("rules")
    if rules is not None and isinstance(rules.node, Sequence):
        items = tuple(_setting(item, (), renamed, problems) for item in rules.node.items)
        entries["rules"] = replace(rules, node=replace(rules.node, items=items))
    return CurrentKeys(replace(tree, entries=entries), tuple(renamed), tuple(problems))


def _entry(entry: Entry, renamed: list[RenamedKey], problems: list[Problem], path: tuple[str, ...] = ()) -> Entry:
    return replace(entry, node=_setting(entry.node, path, renamed, problems))


def _setting(node: Node, path: tuple[str, ...], renamed: list[RenamedKey], problems: list[Problem]) -> Node:
    """A setting and the settings inside it; other keys are left for validation."""
    if not isinstance(node, Mapping):
        return node
    entries: dict[str, Entry] = {}
    for key, entry in node.entries.items():
        if (*path, key) in _SETTINGS:
            entry = _entry(entry, renamed, problems, (*path, key))
        if key == OLD and path in _SETTINGS:
            renamed.append(RenamedKey(entry.key, OLD, NEW))
            if NEW in node.entries:
                problems.append(problem(entry.key, f"{OLD} is the old name of {NEW}, which is given too; remove {OLD}"))
                continue
            key = NEW
        entries[key] = entry
    return replace(node, entries=entries)
