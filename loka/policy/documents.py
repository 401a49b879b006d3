"""Reads a policy file and those that it extends into one tree: bounded in size and depth, with text keys.

PyYAML parses and composes. Words are resolved here, as in YAML 1.2: its own rules are those of 1.1.
"""

from __future__ import annotations

import copy
import os
import posixpath
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, NoReturn

import yaml

from loka.errors import Code
from loka.paths import open_plain
from loka.policy.problems import Place, PolicyError, Problem, printable
from loka.policy.tree import (
    TAGS,
    Node,
    ScalarError,
    ScalarValue,
    content_hash,
    follow,
    merge_documents,
    resolve,
    resolve_tagged,
    with_listed_mods,
)

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_NODES = 50_000  # with aliases expanded
MAX_CHAIN = 16  # files that extend one another

# Characters allowed in YAML, except U+0085, U+2028 and U+2029, which are line breaks in YAML 1.1 but not in editors.
_REFUSED = re.compile("[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_BREAK = re.compile("\r\n|\r|\n")
_UTF_16_OR_32 = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")
_CONTAINER_TAGS = ("", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_ADVICE = (
    ("found another document", "a second document; keep one and remove the '---'"),
    ("while scanning an alias", "a value that begins with * must be in quotes; add them"),
    ("'\\t'", "a tab where YAML takes spaces; replace it with spaces"),
    ("mapping values are not allowed", "a second ': ' on the line; put the text in quotes, or check the indentation"),
    ("found undefined tag handle", "a tag with an unknown handle; remove the tag"),
    ("could not find expected ':'", "a line without 'key: value'; add the ':' or check the indentation above"),
    ("found unexpected end of stream", "a quote that is never closed; close it"),
    ("'<stream end>'", "a bracket that is never closed; close it"),
    ("that cannot start any token", "text that must be in quotes, because of its first character; add them"),
    ("found unknown escape", "an unknown escape; double the backslash, or use single quotes"),
    ("found duplicate anchor", "an anchor that is already in use; give it another name"),
)
_AT_CONTEXT = ("end of stream", "while scanning an alias")  # placed where the quote or the alias begins


@dataclass(frozen=True, slots=True)
class Documents:
    """Result of reading: the merged tree, the files, and the problems so far."""

    tree: Node | None  # None if the policy itself could not be read to its end
    files: tuple[tuple[str, str], ...]  # (relative to the policy's directory, `content_hash`)
    named: tuple[str, ...]  # as named in messages
    problems: tuple[Problem, ...]
    complete: bool  # True if every base was read; otherwise missing fields may be in a base
    bases: tuple[Node, ...]  # what each base says by itself, the nearest first


def read_documents(path: str, keys: Collection[str]) -> Documents:
    """Reads a policy and its bases. Problems are collected, not raised. `keys`: those at the top of a policy."""
    directory, relative = os.path.split(path)
    trees: list[Node] = []
    files: list[tuple[str, str]] = []
    named: list[str] = []
    problems: list[Problem] = []
    seen: list[str] = []
    named_at: Place | None = None  # where the file's name is written
    complete = False
    while True:
        path = os.path.join(directory, relative)
        name = path if named_at is None else _shown(path)
        try:
            tree, found = compose(read_text(path, name), name)
        except PolicyError as error:
            told = [_blame(each, named_at) for each in error.problems]
            foreign = named_at is not None and _is_foreign(path, directory)
            problems += [_unread(each, "no YAML of a policy") for each in told] if foreign else told
            break
        tree = with_listed_mods(tree)
        entries = tree.value if isinstance(tree.value, Mapping) else {}
        unknown = [node for key, node in entries.items() if key not in keys]
        if named_at is not None and unknown and _is_foreign(path, directory):
            problems.append(_unread(Problem(unknown[0].key, "", Code.EXTENDS), "a key that no policy has"))
            break
        trees.append(tree)
        files.append((relative, content_hash(tree)))
        named.append(name)
        problems += found
        seen.append(os.path.realpath(path))
        node = follow(tree, ("extends",))[1]
        if node is tree or node.reported:
            complete = node is tree
            break
        try:
            relative, named_at = _base(node, directory, relative, seen), node.place
        except PolicyError as error:
            problems += error.problems
            trees[-1] = merge_documents(
                tree, replace(tree, value={"extends": replace(node, value=None, reported=True)})
            )
            break
    merged = reduce(merge_documents, reversed(trees)) if trees else None
    return Documents(merged, tuple(files), tuple(named), tuple(problems), complete, tuple(trees[1:]))


def _base(node: Node, directory: str, relative: str, seen: list[str]) -> str:
    """The file that a value of `extends` names, relative to the policy's directory; raises PolicyError for none."""
    target = node.value
    if not isinstance(target, str) or not target.strip():
        _stop(node.place, "extends: give the path of one policy, relative to this file", Code.EXTENDS)
    if os.path.isabs(target) or "\\" in target:
        _stop(
            node.place,
            f"extends: {target!r} must be relative to this file, with forward slashes; write it so",
            Code.EXTENDS,
        )
    base = posixpath.normpath(posixpath.join(posixpath.dirname(relative), target))
    if os.path.realpath(os.path.join(directory, base)) in seen:
        _stop(node.place, f"extends: {target!r} extends this file in turn; remove one of the two", Code.EXTENDS)
    if len(seen) == MAX_CHAIN:
        _stop(node.place, f"extends: more than {MAX_CHAIN} files in a chain; merge some of them", Code.EXTENDS)
    return base


def _is_foreign(path: str, directory: str) -> bool:
    """True for a file that is neither below the policy's folder nor below the current one, behind all links."""
    file = os.path.realpath(path)
    return not any(Path(file).is_relative_to(os.path.realpath(folder or os.curdir)) for folder in (directory, ""))


def _unread(found: Problem, what: str) -> Problem:
    """The problem of a file outside of the project that is no policy: nothing of its text is repeated."""
    if not found.place.line:
        return found
    advice = "name a policy, or run this in a folder that holds the file, to be shown its text"
    return Problem(found.place, f"extends: {what}; {advice}", Code.EXTENDS)


def _blame(found: Problem, named_at: Place | None) -> Problem:
    """A base that cannot be opened is reported where it is named."""
    if named_at is None or found.place.line:
        return found
    return Problem(named_at, f"extends: {printable(found.place.file)}: {found.message}", Code.EXTENDS)


def _shown(path: str) -> str:
    """The path without `x/..`, if that leads to the same file."""
    short = os.path.normpath(path)
    return short if os.path.realpath(short) == os.path.realpath(path) else path


def read_text(path: str, file: str) -> str:
    """The text of a file, named `file` in messages, without a byte order mark.

    Raises PolicyError if it cannot be opened, is larger than `MAX_BYTES`, is not UTF-8 or contains control characters.
    """
    whole = Place(file, 0, 0)
    try:
        with open_plain(path, largest=None) as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        _stop(whole, "no such file; check the path", Code.FILE)
    except IsADirectoryError:
        _stop(whole, "is a directory; give the path of a policy", Code.FILE)
    except OSError as error:
        _stop(whole, f"cannot be read ({error.strerror}); check the path and its permissions", Code.FILE)
    except ValueError:  # a NUL or a lone surrogate in the path
        _stop(whole, "is no valid path; check its characters", Code.FILE)
    if len(data) > MAX_BYTES:
        _stop(whole, f"over {MAX_BYTES} bytes; a policy is a short text: use broader rules", Code.FILE)
    if data.startswith(_UTF_16_OR_32):
        _stop(Place(file, 1, 1), "the file is in UTF-16 or UTF-32; save it as UTF-8", Code.FILE)
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        place = _end_of(data[: error.start].decode("utf-8"), file)
        _stop(place, f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8", Code.FILE)
    found = _REFUSED.search(text)
    if found:
        name = "a NUL character" if found[0] == "\0" else f"the control character U+{ord(found[0]):04X}"
        _stop(_end_of(text[: found.start()], file), f"{name} in the file; remove it", Code.FILE)
    return text


def _end_of(before: str, file: str) -> Place:
    """The place after a text from the start of the file."""
    lines = _BREAK.split(before)
    return Place(file, len(lines), len(lines[-1]) + 1)


def compose(text: str, file: str) -> tuple[Node, list[Problem]]:
    """The document as a tree, and its problems. Raises PolicyError if it cannot be read to its end."""
    loader = None
    try:
        loader = _Loader(text, file)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        _stop(*_advice(error, Place(file, 1, 1), loader.open if loader else []))
    except yaml.YAMLError as error:
        _stop(Place(file, 1, 1), f"not valid YAML: {error}; correct it")
    except (ValueError, OverflowError):
        # PyYAML converts the number in \U escapes and %YAML without checking it.
        place = _place(loader.get_mark()) if loader else Place(file, 1, 1)
        _stop(place, "an escape or version number that is out of range; correct it")
    start, problems = Place(file, 1, 1), list[Problem]()
    root = Node(start, start) if node is None else _tree(node, problems)
    if isinstance(root.value, Mapping):
        return root, problems
    empty = root.value is None and not root.reported
    message = "the policy is empty; it needs at least version, name and model"
    _stop(root.place, message if empty else "a policy is a mapping of keys to values; begin with 'version: 1'")


class _Loader(yaml.SafeLoader):
    """PyYAML's loader with bounds on depth and size.

    An alias is a node at the alias's own place, and nodes without a tag keep none.
    """

    def __init__(self, text: str, file: str) -> None:
        super().__init__(text)
        self.name = file  # of marks
        self.open: list[yaml.Mark] = []  # starts of the lists and mappings that are still open
        self.nodes = 0
        self.sizes: dict[str, int] = {}  # nodes below an anchor, with aliases expanded

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        return ""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        place, before = _place(event.start_mark), self.nodes
        if isinstance(event, yaml.AliasEvent):
            return self._alias(str(event.anchor), place)
        collection = isinstance(event, yaml.CollectionStartEvent)
        if collection and len(self.open) == MAX_DEPTH:
            _stop(place, f"nested more than {MAX_DEPTH} levels deep; a policy needs no more than six")
        self._count(1, place)
        self.open += [event.start_mark] * collection
        node = super().compose_node(parent, index)
        if collection:
            self.open.pop()
        if event.anchor is not None:
            self.sizes[event.anchor] = self.nodes - before
        return node

    def _count(self, nodes: int, place: Place) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            _stop(place, f"over {MAX_NODES} values, aliases written out; use broader rules and fewer aliases")

    def _alias(self, name: str, place: Place) -> yaml.Node:
        if name not in self.anchors:
            _stop(place, f"alias *{name} has no anchor before it; put a pattern that begins with * in quotes")
        if name not in self.sizes:  # it is still open
            _stop(place, f"alias *{name} stands inside its own anchor; write the value out")
        self._count(self.sizes[name], place)
        node = copy.copy(self.anchors[name])
        node.start_mark = self.get_event().start_mark  # type: ignore[no-untyped-call]
        return node


def _tree(node: yaml.Node, problems: list[Problem], key: Place | None = None) -> Node:
    """PyYAML's node as one of ours; problems of single values and keys are added to the list."""
    place = _place(node.start_mark)
    made = Node(place, key or place)
    if isinstance(node, yaml.ScalarNode):
        made = replace(made, text=node.value, quoted=node.style is not None)
    try:
        if isinstance(node, yaml.ScalarNode):
            return replace(made, value=_scalar(node))
        if node.tag not in _CONTAINER_TAGS:
            raise ScalarError(_foreign_tag(node.tag))
    except ScalarError as error:
        problems.append(Problem(place, str(error), Code.YAML))
        return replace(made, reported=True)
    if isinstance(node, yaml.SequenceNode):
        advice = "an item without a value; give it one, or remove it"
        return replace(made, value=tuple(_given(_tree(item, problems), advice, problems) for item in node.value))
    entries: dict[str, Node] = {}
    for key_node, value_node in node.value:
        name = _key(_tree(key_node, problems), entries, problems)
        value = _tree(value_node, problems, _place(key_node.start_mark))
        if name is not None:
            entries[name] = _given(value, f"{name} has no value; give it one, or remove the key", problems)
    return replace(made, value=entries)


def _scalar(node: yaml.ScalarNode) -> ScalarValue:
    """The value of a word; raises ScalarError."""
    if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in node.value):
        raise ScalarError("an escape for NUL or half a surrogate pair; remove it")
    if node.tag and node.tag not in TAGS:
        raise ScalarError(_foreign_tag(node.tag))
    plain = node.value if node.style is not None else resolve(node.value)
    return resolve_tagged(node.value, node.tag) if node.tag else plain


def _given(node: Node, advice: str, problems: list[Problem]) -> Node:
    """An item, or the value of a key. Nothing is a problem: `rules:` with all below it commented out."""
    if node.value is not None or node.reported:
        return node
    problems.append(Problem(node.key, advice, Code.MISSING))
    return replace(node, reported=True)


def _key(node: Node, entries: dict[str, Node], problems: list[Problem]) -> str | None:
    """The text of a key; None, with a problem reported, for a value that cannot be a key."""
    if node.reported:
        return None
    if not isinstance(node.value, str):
        what = "a list or mapping is" if isinstance(node.value, tuple | Mapping) else f"{node.text or 'nothing'} is"
        message = f"{what} no key; a key is a word followed by ':'"
    elif node.value == "<<" and not node.quoted:
        message = "merge keys (<<) are not part of a policy; write the fields out, or use extends"
    elif node.value in entries:
        message = f"duplicate key {node.value!r}, first on line {entries[node.value].key.line}; keep one"
    else:
        return node.value
    problems.append(Problem(node.place, message, Code.YAML))
    return None


def _foreign_tag(tag: str) -> str:
    return f"tag {tag.replace('tag:yaml.org,2002:', '!!')} is not allowed in a policy; remove it"


def _place(mark: Any) -> Place:
    return Place(mark.name, mark.line + 1, mark.column + 1)


def _advice(error: yaml.MarkedYAMLError, start: Place, opened: list[yaml.Mark]) -> tuple[Place, str]:
    """Place and advice for PyYAML's message; `opened` are the starts of lists and mappings that are not closed."""
    message = " ".join(filter(None, (error.context, error.problem)))
    marks = [error.problem_mark, error.context_mark]
    if any(part in message for part in _AT_CONTEXT):
        marks.reverse()
    if "<stream end>" in message and opened:
        marks = [opened[-1]]
    place = next((_place(mark) for mark in marks if mark is not None), start)
    unknown = f"not valid YAML: {error.problem or message}; check the indentation, quotes and brackets here"
    return place, next((advice for part, advice in _ADVICE if part in message), unknown)


def _stop(place: Place, message: str, code: Code = Code.YAML) -> NoReturn:
    raise PolicyError([Problem(place, message, code)])
