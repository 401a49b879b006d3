"""A YAML document as a tree with the position of every value and every key."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping as MappingType
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, field, replace

from loka.policy.problems import Place

Path = tuple[str | int, ...]  # ("rules", 0, "fprop", "format")
ScalarValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Scalar:
    """Text, a number, a boolean or nothing. `reported` marks a value of any kind whose problem is reported already."""

    place: Place
    value: ScalarValue
    text: str  # as written
    quoted: bool = False
    reported: bool = False


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list."""

    place: Place
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One `key: value` of a mapping."""

    key: Place
    node: Node


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapping with text keys."""

    place: Place
    entries: MappingType[str, Entry] = field(default_factory=dict)


Node = Scalar | Sequence | Mapping

NOT_PLANNED = ("train",)  # top-level keys that no plan depends on
APPENDED = ("rules", "mods")  # top-level lists to which a base and its child both add


def plain(node: Node) -> object:
    """The tree as dicts, lists and scalars."""
    if isinstance(node, Mapping):
        return {key: plain(entry.node) for key, entry in node.entries.items()}
    if isinstance(node, Sequence):
        return [plain(item) for item in node.items]
    return node.value


def content_hash(tree: Mapping) -> str:
    """sha256 of what a file says about a plan: its values, without `train`, comments and the order of keys."""
    said = {key: plain(entry.node) for key, entry in tree.entries.items() if key not in NOT_PLANNED}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def merge_documents(base: Mapping, child: Mapping, appended: tuple[str, ...] = APPENDED) -> Mapping:
    """The child merged over its base: mappings by key; lists named in `appended` follow those of the base."""
    entries = dict(base.entries)
    for key, entry in child.entries.items():
        node = entry.node
        below = base.entries[key].node if key in base.entries else None
        if below is not None and key in appended:
            # A value of the wrong type is kept alone, so that validation reports it at its own position.
            if not isinstance(below, Sequence):
                node = below
            elif isinstance(node, Sequence):
                node = replace(node, items=below.items + node.items)
        elif isinstance(below, Mapping) and isinstance(node, Mapping):
            node = merge_documents(below, node, ())
        entries[key] = Entry(entry.key, node)
    return replace(child, entries=entries)


@dataclass(frozen=True, slots=True)
class FoundNode:
    """Node at the end of a path, as far as the path exists in the tree."""

    path: Path
    node: Node
    key: Place  # of the key that holds the node, or of the node itself in a list and at the top


def follow(root: Mapping, path: SequenceType[str | int]) -> FoundNode:
    """Walks down the path; steps that do not exist are skipped."""
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


TAGS: dict[str, type] = {
    f"tag:yaml.org,2002:{name}": kind
    for name, kind in (("str", str), ("int", int), ("float", float), ("bool", bool), ("null", type(None)))
}
_WORDS = {"": None, "~": None} | {
    form: value
    for word, value in (("null", None), ("true", True), ("false", False))
    for form in (word, word.title(), word.upper())
}
_BOOL_1_1 = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_MAX_DIGITS = 18  # fits 64 bits


class ScalarError(ValueError):
    """A word without a meaning here; the message has advice."""


def resolve(text: str) -> ScalarValue:
    """The value of an unquoted word.

    Raises ScalarError for numbers that are not finite or too long, and for words that YAML parsers resolve differently.
    """
    if text in _WORDS:
        return _WORDS[text]
    if text.lower() in _BOOL_1_1 and text in (text.lower(), text.title(), text.upper()):
        raise ScalarError(
            f"{text} is a boolean to some YAML readers and text to others; "
            f'write {_BOOL_1_1[text.lower()]}, or "{text}" in quotes if text is meant'
        )
    if _DECIMAL.fullmatch(text):
        return _decimal(text)
    if _FLOAT.fullmatch(text):
        value = float(text)
        if not math.isfinite(value):
            raise ScalarError(f"{_short(text)} is too large for a number; give a finite one")
        return value
    if _NOT_FINITE.fullmatch(text):
        raise ScalarError(f'{text} is not finite; give a finite number, or "{text}" in quotes if text is meant')
    return text


def resolve_tagged(text: str, tag: str) -> ScalarValue:
    """The value of a word with one of `TAGS`; raises ScalarError if they do not match."""
    value = text if TAGS[tag] is str else resolve(text)
    if TAGS[tag] is float and type(value) is int:
        return float(value)
    if type(value) is not TAGS[tag]:
        raise ScalarError(f"{_short(text)!r} is no !!{tag.rpartition(':')[2]}; remove the tag")
    return value


def looks_like_number(text: str) -> bool:
    """True if the text would be a number without its quotes."""
    return _FLOAT.fullmatch(text) is not None


def _decimal(text: str) -> int:
    digits = text.lstrip("+-")
    if len(digits) > 1 and digits.startswith("0") and digits.strip("0"):
        raise ScalarError(
            f"{_short(text)} is octal to some YAML readers and decimal to others; remove the leading zeros"
        )
    if len(digits) > _MAX_DIGITS:
        message = f"{_short(text)} is too large for a number here; give one of at most {_MAX_DIGITS} digits"
        raise ScalarError(message)
    return int(text)


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
