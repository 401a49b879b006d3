"""Keys of a policy that have another name today: the old one stands for the new one wherever that may stand."""

from __future__ import annotations

from dataclasses import dataclass, replace

from loka.policy.problems import Place, Problem, problem
from loka.policy.yaml.tree import Entry, Mapping, Node, Sequence

OLD, NEW = "turned", "requantize_transpose"
# The mappings below `defaults` and below a rule in which the key may stand; () is the setting of the site itself.
_SETTINGS = ((), ("dgrad",), ("wgrad",), ("dgrad", "weight"), ("wgrad", "grad_output"), ("wgrad", "input"))


@dataclass(frozen=True, slots=True)
class RenamedKey:
    """An old name in a policy."""

    place: Place
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.place}: {self.old} is called {self.new} now; the old name still works"


@dataclass(frozen=True, slots=True)
class CurrentKeys:
    """A tree with today's names, the old ones that it had, and where both names of one key stand side by side."""

    tree: Mapping
    renamed: tuple[RenamedKey, ...]
    problems: tuple[Problem, ...]


def with_current_keys(tree: Mapping) -> CurrentKeys:
    """One document of a policy under today's names, before it is merged with what it extends."""
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
    """A setting, and those that stand in it; a key that is not a setting's is left for validation to refuse."""
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
