"""Damage to files: JSON and YAML as trees that may hold what neither allows, changed at one value; bytes changed.

A change is four numbers, which hypothesis draws and shrinks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Object:
    """A mapping as a list of pairs, so that a key can stand twice."""

    pairs: list[list[Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Raw:
    """Text that is written as it is."""

    text: str


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 7, 1 << 31, 1 << 53, (1 << 63) - 1),
    *(1 << 64, -(1 << 63) - 1, 0.5, -0.0, 5e-324, 1.5e308),
    *(Raw("9" * 5000), Raw("1e999"), Raw("-1e999"), Raw("NaN")),
    *(Raw("Infinity"), Raw("-Infinity"), Raw("1" + "0" * 400)),
    *("", " ", "x", "1", "0.5", "nan", "inf", "-inf", "null", "*"),
    *("re:(", "re:(a+)+$", "[", "a:b", "a.b:c", "..", "../x", "/"),
    *("a\nb", "a\r", "\x00", "\x1b[31m", "\u202e", "\ufeff", "\u2028"),
    *("\x85", "\ud800", "é", "𝐚", "ａ", "x" * 5000, "𝐚" * 1500),
    *("__class__", "class", "self", "{0}", "%s", "${x}", "<b>", "h100", "fp8", "keep", "linear", "e4m3", "fprop"),
    *([], [None], [[]], Object(), Object([["", None]])),
    *(Object([["a", 1], ["a", 2]]), Object([["x" * 3000, "y" * 3000]])),
    *(Raw("[" * 60 + "]" * 60), Raw("[" * 3000 + "]" * 3000)),
    *(Raw('{"a":' * 3000 + "1" + "}" * 3000), [0] * 300, ["x"] * 300),
    Object([[f"k{i}", i] for i in range(300)]),
)  # fmt: skip
ODD_YAML: tuple[Any, ...] = (
    *map(Raw, ("*a", "&a [*a]", "&a x", "[&a {b: c}, *a, *a]", "!!python/object/apply:os.getpid []", "!!binary aGk=")),
    *map(Raw, ("!!int x", "!!float 1", "!!set {a, b}", "!!omap [a: 1]")),
    *map(Raw, ("!!null x", "!!timestamp 2020-01-01", "!x y", "!<x> y")),
    *map(Raw, (".nan", ".inf", "-.INF", "0x1F", "0o17", "1_000")),
    *map(Raw, ("12:30:45", "2020-01-01", "~", "yes", "NULL", "1e3", "+1")),
    *map(Raw, ("{<<: {a: 1}}", "{? [a] : b}", "'x", '"\\xZZ"', '"\\U00110000"')),
    *map(Raw, ("|\n x", ">-\n\n x", "@x", "`x", "%x", "# x", "- x")),
)  # fmt: skip

SNIPPETS = (
    *(b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"\r", b"\n"),
    *(b"\t", b"\x1b[31m", b"\xe2\x80\xae", b"{", b"}", b"[", b"]"),
    *(b'"', b"'", b":", b": ", b"- ", b",", b"#", b"&a ", b"*a", b"!!"),
    *(b"? ", b"|", b"<<: ", b"---\n", b"...\n", b"%YAML 9.9\n"),
    *(b"NaN", b"-", b"1e999", b"9" * 5000, b"[" * 2000, b"{a: " * 2000),
    *(b"x" * 3000, b"\\u0000", b"\\ud800", b"null", b"true"),
)  # fmt: skip

Change = tuple[int, int, int, int]
Slot = tuple[list[Any], int, list[Any], int]  # a list and the index of a value in it; a list and that of its pair


def parsed(text: str) -> Any:
    """JSON as a tree; numbers of JSON that Python lacks stay as they are."""
    return json.loads(text, object_pairs_hook=lambda pairs: Object([list(pair) for pair in pairs]))


def tree_of(value: Any) -> Any:
    """Plain values as a tree."""
    if isinstance(value, dict):
        return Object([[key, tree_of(each)] for key, each in value.items()])
    return [tree_of(each) for each in value] if isinstance(value, list) else value


def written(tree: Any) -> str:
    """A tree as JSON, which YAML is too."""
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, Object):
        return "{" + ", ".join(f"{_key(key)}: {written(value)}" for key, value in tree.pairs) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(written, tree)) + "]"
    return json.dumps(tree)


def _key(key: Any) -> str:
    return key.text if isinstance(key, Raw) else json.dumps(key)


def slots(tree: Any) -> dict[tuple[str, ...], list[Slot]]:
    """Every value below a tree by its kind: its keys on the way, "" for any index."""
    found: dict[tuple[str, ...], list[Slot]] = {}
    left: list[tuple[Any, tuple[str, ...]]] = [(tree, ())]
    while left:
        value, kind = left.pop()
        if isinstance(value, Object):
            for at, pair in enumerate(value.pairs):
                inner = (*kind, str(pair[0]))
                found.setdefault(inner, []).append((pair, 1, value.pairs, at))
                left.append((pair[1], inner))
        elif isinstance(value, list):
            for at, each in enumerate(value):
                found.setdefault((*kind, ""), []).append((value, at, value, at))
                left.append((each, (*kind, "")))
    return found


def _chosen(kinds: list[list[Slot]], kind: int, which: int) -> Slot:
    """One value: first its kind is chosen, so that what stands there once is found as often as a row."""
    found = kinds[kind % len(kinds)]
    return found[which % len(found)]


def drop(slot: Slot, value: Any, other: Slot) -> None:
    _, _, owner, at = slot
    del owner[at]


def duplicate(slot: Slot, value: Any, other: Slot) -> None:
    held, _, owner, at = slot
    owner.insert(at, owner[at] if owner is held else list(owner[at]))


def retype(slot: Slot, value: Any, other: Slot) -> None:
    slot[0][slot[1]] = value


def rename(slot: Slot, value: Any, other: Slot) -> None:
    held, _, owner, at = slot
    owner[at] = value if owner is held else [value if isinstance(value, str | Raw) else "renamed", held[1]]


def exchange(slot: Slot, value: Any, other: Slot) -> None:
    """The one becomes the other, which stays where it is unless it holds the one."""
    copy = json.dumps(None) if other is slot else written(other[0][other[1]])
    slot[0][slot[1]] = Raw(copy)


def wrap(slot: Slot, value: Any, other: Slot) -> None:
    slot[0][slot[1]] = [slot[0][slot[1]]]


def nudge(slot: Slot, value: Any, other: Slot) -> None:
    """A value of the same type, and another."""
    old = slot[0][slot[1]]
    if isinstance(old, bool):
        new: Any = not old
    elif isinstance(old, int | float):
        new = {0: old + 1, 1: old - 1, 2: -old, 3: old * 1000, 4: 0, 5: old / 3}[len(written(value)) % 6]
    elif isinstance(old, str):
        new = old[1:] + old[:1] if len(written(value)) % 2 else old + (value if isinstance(value, str) else "x")
    else:
        new = value
    slot[0][slot[1]] = new


CHANGES: tuple[Callable[[Slot, Any, Slot], None], ...] = (
    drop, duplicate, retype, retype, retype, rename, exchange, wrap, nudge, nudge,
)  # fmt: skip


def changed(trees: list[Any], changes: Sequence[Change], odd: tuple[Any, ...] = ODD) -> None:
    """Change trees in place, each change at one value: which change, which kind of value, which one, what to put."""
    for number, kind, which, put in changes:
        kinds = list(slots(trees).values())
        if kinds:
            slot, other = _chosen(kinds, kind, which), _chosen(kinds, put, which)
            CHANGES[number % len(CHANGES)](slot, deepcopy(odd[put % len(odd)]), other)


def damaged(data: bytes, changes: Sequence[Change]) -> bytes:
    """Bytes flipped, cut, inserted, repeated, taken out, or zeroed."""
    for kind, place, length, put in changes:
        at = place * 7919 % (len(data) + 1)
        end = min(len(data), at + length % 64)
        snippet = SNIPPETS[put % len(SNIPPETS)]
        if kind % 7 == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << put % 8]) + data[at + 1 :]
        elif kind % 7 == 1:
            data = data[:at]
        elif kind % 7 in (2, 3):
            data = data[:at] + snippet + data[at:]
        elif kind % 7 == 4:
            data = data[:end] + data[at:end] * (1 + put % 50) + data[end:]
        elif kind % 7 == 5:
            data = data[:at] + data[end:]
        else:
            data = data[:at] + bytes(end - at) + data[end:]
    return data
