"""A YAML document as a tree in which every value and every key knows its place."""

from __future__ import annotations

from collections.abc import Mapping as MappingType
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, field, replace

from loka.policy.problems import Place

Path = tuple[str | int, ...]  # ("rules", 0, "fprop", "format")


@dataclass(frozen=True, slots=True)
class Scalar:
    """Text, a number, a boolean or nothing. `reported` marks a value whose problem is already on the list."""

    place: Place
    value: str | int | float | bool | None
    text: str  # as written
    quoted: bool = False
    reported: bool = False
    size: int = 1


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list. `size` counts the nodes in it, aliases written out."""

    place: Place
    items: tuple[Node, ...]
    size: int = 1
    reported: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One `key: value` of a mapping."""

    key: Place
    node: Node


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapping with text keys. `size` counts the nodes in it, aliases written out."""

    place: Place
    entries: MappingType[str, Entry] = field(default_factory=dict)
    size: int = 1
    reported: bool = False


Node = Scalar | Sequence | Mapping

APPENDED = ("rules", "mods")  # lists of the top level that a base and its child both add to


def plain(node: Node) -> object:
    """The tree as dicts, lists and scalars."""
    if isinstance(node, Mapping):
        return {key: plain(entry.node) for key, entry in node.entries.items()}
    if isinstance(node, Sequence):
        return [plain(item) for item in node.items]
    return node.value


def merge_documents(base: Mapping, child: Mapping) -> Mapping:
    """The child over its base: mappings merge key by key, `rules` and `mods` of the base come first."""
    merged = _merge(base, child)
    entries = dict(merged.entries)
    for name in APPENDED:
        if name not in base.entries or name not in child.entries:
            continue
        ours, theirs = child.entries[name], base.entries[name].node
        # A value of the wrong type stays alone, so that validation reports it at its own place.
        if not isinstance(theirs, Sequence):
            entries[name] = base.entries[name]
        elif isinstance(ours.node, Sequence):
            entries[name] = Entry(ours.key, replace(ours.node, items=theirs.items + ours.node.items))
    return replace(merged, entries=entries)


def _merge(base: Mapping, child: Mapping) -> Mapping:
    entries = dict(base.entries)
    for key, entry in child.entries.items():
        below = base.entries.get(key)
        if below is not None and isinstance(below.node, Mapping) and isinstance(entry.node, Mapping):
            entry = Entry(entry.key, _merge(below.node, entry.node))
        entries[key] = entry
    return replace(child, entries=entries)


@dataclass(frozen=True, slots=True)
class FoundNode:
    """Where a path leads: as far as it exists in the tree."""

    path: Path
    node: Node
    key: Place  # of the key that holds the node, or of the node itself in a list and at the top


def follow(root: Mapping, path: SequenceType[str | int]) -> FoundNode:
    """Walks down as far as the path exists; steps that are not there are left out."""
    found = FoundNode((), root, root.place)
    for step in path:
        node = found.node
        if isinstance(node, Mapping) and isinstance(step, str) and step in node.entries:
            entry = node.entries[step]
            found = FoundNode((*found.path, step), entry.node, entry.key)
        elif isinstance(node, Sequence) and isinstance(step, int) and 0 <= step < len(node.items):
            item = node.items[step]
            found = FoundNode((*found.path, step), item, item.place)
    return found
