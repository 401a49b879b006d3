"""A YAML document as a tree with the position of every value and every key."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from loka.policy.problems import Place

Path = tuple[str | int, ...]  # ("rules", 0, "fprop", "format")
ScalarValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Node:
    """A value: text, a number, a boolean or nothing, a list, or a mapping with text keys."""

    place: Place
    key: Place  # of the key that holds it; its own place in a list and at the top
    value: ScalarValue | tuple[Node, ...] | Mapping[str, Node] = None
    text: str = ""  # of a scalar, as written
    quoted: bool = False
    reported: bool = False  # its problem is reported already


NOT_PLANNED = ("train",)  # top-level keys that no plan depends on
APPENDED = ("rules", "mods")  # top-level lists to which a base and its child both add


def with_listed_mods(root: Node) -> Node:
    """The tree with `mods: {auto: false}` as a list of that one entry, so that bases and children add to it."""
    if not isinstance(root.value, Mapping):
        return root
    mods = root.value.get("mods")
    if mods is None or not isinstance(mods.value, Mapping) or "auto" not in mods.value:
        return root
    entry = replace(mods, key=mods.place)
    return replace(root, value={**root.value, "mods": replace(mods, value=(entry,))})


def plain(node: Node) -> object:
    """The tree as dicts, lists and scalars."""
    if isinstance(node.value, Mapping):
        return {key: plain(each) for key, each in node.value.items()}
    return [plain(item) for item in node.value] if isinstance(node.value, tuple) else node.value


def content_hash(tree: Node) -> str:
    """sha256 of what a file says about a plan: its values, without `train`, comments and the order of keys."""
    said = {key: value for key, value in cast("dict[str, object]", plain(tree)).items() if key not in NOT_PLANNED}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def merge_documents(base: Node, child: Node, appended: tuple[str, ...] = APPENDED) -> Node:
    """The child merged over its base: mappings by key; lists named in `appended` follow those of the base."""
    if not isinstance(base.value, Mapping) or not isinstance(child.value, Mapping):
        return child
    entries = dict(base.value)
    for key, node in child.value.items():
        below = base.value.get(key)
        if below is not None and key in appended:
            # A value of the wrong type is kept alone, so that validation reports it at its own position.
            if not isinstance(below.value, tuple):
                node = replace(below, key=node.key)
            elif isinstance(node.value, tuple):
                node = replace(node, value=below.value + node.value)
        elif below is not None:
            node = merge_documents(below, node, ())
        entries[key] = node
    return replace(child, value=entries)


def follow(root: Node, path: Sequence[str | int]) -> tuple[Path, Node]:
    """The path as far as it exists in the tree, and the node at its end; steps that do not exist are skipped."""
    found: Path = ()
    node = root
    for step in path:
        value, below = node.value, None
        if isinstance(value, Mapping) and isinstance(step, str):
            below = value.get(step)
        elif isinstance(value, tuple) and isinstance(step, int) and 0 <= step < len(value):
            below = value[step]
        if below is not None:
            found, node = (*found, step), below
    return found, node


def node_at(root: Node, path: Sequence[str | int]) -> Node:
    """The node at a path, as far as it exists."""
    return follow(root, path)[1]


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
