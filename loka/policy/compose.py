"""Composes YAML text to a tree with positions: one document, text keys, core schema tags, bounded depth and size.

PyYAML parses; its events are composed here, because its own composer recurses, does not keep explicit tags, and
resolves words as in YAML 1.1. A file that `extends` others is merged with them into one tree.
"""

from __future__ import annotations

import os
import posixpath
from dataclasses import dataclass, field, replace
from typing import NoReturn, Protocol

import yaml

from loka.policy.policy_file import read_source
from loka.policy.problems import Place, PolicyError, Problem, printable, problem
from loka.policy.renamed_keys import RenamedKey, with_current_keys
from loka.policy.tree import (
    SCALAR_TAGS,
    Entry,
    Mapping,
    Node,
    Scalar,
    ScalarError,
    Sequence,
    content_hash,
    merge_documents,
    resolve,
    resolve_tagged,
)

MAX_DEPTH = 32
MAX_NODES = 50_000  # with aliases expanded

_CONTAINER_TAGS = {
    yaml.MappingStartEvent: ("tag:yaml.org,2002:map", "!"),
    yaml.SequenceStartEvent: ("tag:yaml.org,2002:seq", "!"),
}
_ADVICE = (
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


class _Mark(Protocol):
    """PyYAML's position, 0-based."""

    line: int
    column: int


class _StopError(Exception):
    """The rest of the document cannot be read; the problem is reported."""


@dataclass(slots=True)
class _Frame:
    """An open list or mapping."""

    place: Place
    mapping: bool
    anchor: str | None
    reported: bool
    size: int = 1
    items: list[Node] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
    at_key: bool = True
    key: str | None = None  # None if the key was rejected: its value is dropped
    key_place: Place | None = None


def compose(text: str, file: str) -> tuple[Mapping | None, list[Problem]]:
    """The document as a tree, and its problems; no tree if it cannot be read to its end."""
    composer = _Composer(file)
    try:
        return composer.run(text), composer.problems
    except _StopError:
        return None, composer.problems


class _Composer:
    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self.stack: list[_Frame] = []
        self.anchors: dict[str, Node | None] = {}  # None while the anchored list or mapping is still open
        self.root: Node | None = None
        self.nodes = 0

    def run(self, text: str) -> Mapping:
        self._parse(text)
        root = self.root
        if root is None or (isinstance(root, Scalar) and root.value is None):
            place = root.place if root and not root.reported else Place(self.file, 1, 1)
            self._stop(place, "the policy is empty; it needs at least version, name and model")
        if not isinstance(root, Mapping):
            place = root.place if root else Place(self.file, 1, 1)
            self._stop(place, "a policy is a mapping of keys to values; begin with 'version: 1'")
        return root

    def _parse(self, text: str) -> None:
        loader = None
        documents = 0
        try:
            loader = yaml.SafeLoader(text)
            while loader.check_event():
                event: yaml.Event = loader.get_event()  # type: ignore[no-untyped-call]
                if isinstance(event, yaml.DocumentStartEvent):
                    documents += 1
                    if documents > 1:
                        self._stop(self._at(event.start_mark), "a second document; keep one and remove the '---'")
                self._take(event)
        except yaml.MarkedYAMLError as error:
            unclosed = "<stream end>" in (error.problem or "") and self.stack
            self._stop(self.stack[-1].place if unclosed else self._at(_mark(error)), _syntax(error))
        except yaml.YAMLError as error:
            self._stop(Place(self.file, 1, 1), f"not valid YAML: {error}; correct it")
        except (ValueError, OverflowError):
            # PyYAML converts the number in \U escapes and %YAML without checking it.
            mark = loader.get_mark() if loader else None
            self._stop(self._at(mark), "an escape or version number that is out of range; correct it")
        finally:
            if loader is not None:
                loader.dispose()

    def _take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.ScalarEvent):
            self._count(event, 1)
            self._add(self._scalar(event), event.anchor)
        elif isinstance(event, yaml.AliasEvent):
            self._add(self._alias(event), None)
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            self._open(event)
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            self._close()

    def _scalar(self, event: yaml.ScalarEvent) -> Scalar:
        place = self._at(event.start_mark)
        quoted = event.style is not None
        node = Scalar(place, event.value, event.value, quoted=quoted)
        try:
            if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in event.value):
                raise ScalarError("an escape for NUL or half a surrogate pair; remove it")
            if event.tag is not None and event.tag != "!":
                if event.tag not in SCALAR_TAGS:
                    raise ScalarError(_foreign_tag(event.tag))
                return replace(node, value=resolve_tagged(event.value, event.tag))
            return node if quoted or event.tag == "!" else replace(node, value=resolve(event.value))
        except ScalarError as error:
            self.problems.append(problem(place, str(error)))
            return replace(node, reported=True)

    def _alias(self, event: yaml.AliasEvent) -> Node:
        place = self._at(event.start_mark)
        name = str(event.anchor)
        if name not in self.anchors:
            self._stop(place, f"alias *{name} has no anchor before it; put a pattern that begins with * in quotes")
        node = self.anchors[name]
        if node is None:
            self._stop(place, f"alias *{name} stands inside its own anchor; write the value out")
        self._count(event, node.size)
        return replace(node, place=place)

    def _open(self, event: yaml.MappingStartEvent | yaml.SequenceStartEvent) -> None:
        self._count(event, 1)
        place = self._at(event.start_mark)
        if len(self.stack) >= MAX_DEPTH:
            self._stop(place, f"nested more than {MAX_DEPTH} levels deep; a policy needs no more than six")
        tagged = event.tag is not None and event.tag not in _CONTAINER_TAGS[type(event)]
        if tagged:
            self.problems.append(problem(place, _foreign_tag(str(event.tag))))
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        self.stack.append(_Frame(place, isinstance(event, yaml.MappingStartEvent), event.anchor, tagged))

    def _close(self) -> None:
        frame = self.stack.pop()
        node: Node
        if frame.mapping:
            node = Mapping(frame.place, frame.entries, frame.size, frame.reported)
        else:
            node = Sequence(frame.place, tuple(frame.items), frame.size, frame.reported)
        self._add(node, frame.anchor)

    def _add(self, node: Node, anchor: str | None) -> None:
        if anchor is not None:
            self.anchors[anchor] = node
        if not self.stack:
            self.root = node
            return
        frame = self.stack[-1]
        frame.size += node.size
        if not frame.mapping:
            frame.items.append(self._refuse_nothing(node))
        elif frame.at_key:
            frame.key, frame.key_place, frame.at_key = self._key(frame, node), node.place, False
        else:
            if frame.key is not None and frame.key_place is not None:
                frame.entries[frame.key] = Entry(frame.key_place, self._refuse_nothing(node, frame))
            frame.at_key = True

    def _key(self, frame: _Frame, node: Node) -> str | None:
        """The text of a key; None, with a problem reported, for a value that cannot be a key."""
        if not isinstance(node, Scalar) or not isinstance(node.value, str):
            what = f"{node.text or 'nothing'} is" if isinstance(node, Scalar) else "a list or mapping is"
            self.problems.append(problem(node.place, f"{what} no key; a key is a word followed by ':'"))
            return None
        if node.reported:
            return None
        if node.value == "<<" and not node.quoted:
            message = "merge keys (<<) are not part of a policy; write the fields out, or use extends"
            self.problems.append(problem(node.place, message))
            return None
        if node.value in frame.entries:
            first = frame.entries[node.value].key
            self.problems.append(
                problem(node.place, f"duplicate key {node.value!r}, first on line {first.line}; keep one")
            )
            return None
        return node.value

    def _refuse_nothing(self, node: Node, frame: _Frame | None = None) -> Node:
        """A key or list item without a value is reported: `rules:` with everything under it commented out."""
        if not isinstance(node, Scalar) or node.value is not None or node.reported:
            return node
        if frame is not None and frame.key_place is not None:
            self.problems.append(problem(frame.key_place, f"{frame.key} has no value; give it one, or remove the key"))
        else:
            self.problems.append(problem(node.place, "an item without a value; give it one, or remove it"))
        return replace(node, reported=True)

    def _count(self, event: yaml.Event, size: int) -> None:
        self.nodes += size
        if self.nodes > MAX_NODES:
            message = f"over {MAX_NODES} values, aliases written out; use broader rules and fewer aliases"
            self._stop(self._at(event.start_mark), message)

    def _at(self, mark: _Mark | None) -> Place:
        return Place(self.file, mark.line + 1, mark.column + 1) if mark else Place(self.file, 1, 1)

    def _stop(self, place: Place, message: str) -> NoReturn:
        self.problems.append(problem(place, message))
        raise _StopError


def _foreign_tag(tag: str) -> str:
    return f"tag {tag.replace('tag:yaml.org,2002:', '!!')} is not allowed in a policy; remove it"


def _mark(error: yaml.MarkedYAMLError) -> _Mark | None:
    """Position of an error: the opening quote or the value that begins with *; otherwise where the parser stopped."""
    if "end of stream" in (error.problem or "") or error.context == "while scanning an alias":
        return error.context_mark or error.problem_mark
    return error.problem_mark or error.context_mark


def _syntax(error: yaml.MarkedYAMLError) -> str:
    """Advice for PyYAML's message."""
    message = error.problem or error.context or "unreadable"
    if error.context == "while scanning an alias":
        return "a value that begins with * must be in quotes; add them"
    for part, advice in _ADVICE:
        if part in message:
            return advice
    return f"not valid YAML: {message}; check the indentation, quotes and brackets here"


MAX_CHAIN = 16  # files


@dataclass(frozen=True, slots=True)
class Documents:
    """Result of reading: the merged tree, the files, and the problems so far."""

    tree: Mapping | None  # None if a file could not be read to its end
    files: tuple[tuple[str, str], ...]  # (relative to the policy's directory, `content_hash`)
    named: tuple[str, ...]  # as named in messages
    problems: tuple[Problem, ...]
    complete: bool  # True if every base was read; otherwise missing fields may be in a base
    renamed: tuple[RenamedKey, ...] = ()  # keys under old names
    own: Mapping | None = None  # what the file says by itself
    bases: tuple[Mapping, ...] = ()  # what each base says by itself, the nearest first


def read_documents(path: str) -> Documents:
    """Reads a policy and its bases. Problems are collected, not raised."""
    directory, name = os.path.split(path)
    return _read(directory, name, None, ())


def _read(directory: str, relative: str, named_at: Place | None, seen: tuple[str, ...]) -> Documents:
    """One file and its bases; `relative` is relative to the policy's directory, `named_at` the position of its name."""
    path = os.path.join(directory, relative)
    named = path if named_at is None else _shown(path)
    try:
        source = read_source(path, named)
    except PolicyError as error:
        return Documents(None, (), (), tuple(_blame(each, named_at) for each in error.problems), False)
    names = (named,)
    tree, problems = compose(source.text, named)
    if tree is None:
        return Documents(None, ((relative, ""),), names, tuple(problems), False)
    current = with_current_keys(tree)
    tree, problems = current.tree, [*problems, *current.problems]
    files = ((relative, content_hash(tree)),)
    entry = tree.entries.get("extends")
    if entry is None or entry.node.reported:
        return Documents(tree, files, names, tuple(problems), entry is None, current.renamed, tree)
    target = entry.node
    refusal = _refusal(target)
    seen = (*seen, os.path.realpath(path))
    if refusal is None and isinstance(target, Scalar):
        base = posixpath.normpath(posixpath.join(posixpath.dirname(relative), str(target.value)))
        if os.path.realpath(os.path.join(directory, base)) in seen:
            refusal = f"extends: {target.value!r} extends this file in turn; remove one of the two"
        elif len(seen) >= MAX_CHAIN:
            refusal = f"extends: more than {MAX_CHAIN} files in a chain; merge some of them"
        else:
            found = _over(tree, _read(directory, base, target.place, seen), files, names, problems)
            return replace(found, renamed=current.renamed + found.renamed)
    problems.append(problem(target.place, refusal or ""))
    # The value is reported: validation must not report it again.
    entries = {**tree.entries, "extends": replace(entry, node=replace(target, reported=True))}
    tree = replace(tree, entries=entries)
    return Documents(tree, files, names, tuple(problems), False, current.renamed, tree)


def _over(
    tree: Mapping, base: Documents, files: tuple[tuple[str, str], ...], names: tuple[str, ...], problems: list[Problem]
) -> Documents:
    """A file's own tree merged over its base."""
    merged = tree if base.tree is None else merge_documents(base.tree, tree)
    found = (*problems, *base.problems)
    own = () if base.own is None else (base.own, *base.bases)
    return Documents(merged, files + base.files, names + base.named, found, base.complete, base.renamed, tree, own)


def _refusal(target: object) -> str | None:
    """Reason why a value of `extends` names no file; None where it does."""
    if not isinstance(target, Scalar) or not isinstance(target.value, str) or not target.value.strip():
        return "extends: give the path of one policy, relative to this file"
    if os.path.isabs(target.value) or "\\" in target.value:
        return f"extends: {target.value!r} must be relative to this file, with forward slashes; write it so"
    return None


def _blame(found: Problem, named_at: Place | None) -> Problem:
    """A base that cannot be opened is reported where it is named."""
    if named_at is None or found.line:
        return found
    return problem(named_at, f"extends: {printable(found.file)}: {found.message}")


def _shown(path: str) -> str:
    """The path without `x/..`, if that leads to the same file."""
    short = os.path.normpath(path)
    return short if os.path.realpath(short) == os.path.realpath(path) else path
