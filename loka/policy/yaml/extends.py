"""A policy file and the bases that it extends, merged into one tree."""

from __future__ import annotations

import os
import posixpath
from dataclasses import dataclass, replace

from loka.policy.problems import Place, PolicyError, Problem, printable, problem
from loka.policy.yaml.compose import compose
from loka.policy.yaml.policy_file import read_source
from loka.policy.yaml.renamed_keys import RenamedKey, with_current_keys
from loka.policy.yaml.tree import Mapping, Scalar, merge_documents

MAX_CHAIN = 16  # files


@dataclass(frozen=True, slots=True)
class Documents:
    """Result of reading: the merged tree, the files, and the problems so far."""

    tree: Mapping | None  # None if a file could not be read to its end
    files: tuple[tuple[str, str], ...]  # (relative to the policy's directory, sha256)
    named: tuple[str, ...]  # as named in messages
    problems: tuple[Problem, ...]
    complete: bool  # True if every base was read; otherwise missing fields may be in a base
    renamed: tuple[RenamedKey, ...] = ()  # keys under old names


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
    files, names = ((relative, source.sha256),), (named,)
    tree, problems = compose(source.text, named)
    if tree is None:
        return Documents(None, files, names, tuple(problems), False)
    current = with_current_keys(tree)
    tree, problems = current.tree, [*problems, *current.problems]
    entry = tree.entries.get("extends")
    if entry is None or entry.node.reported:
        return Documents(tree, files, names, tuple(problems), entry is None, current.renamed)
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
    return Documents(replace(tree, entries=entries), files, names, tuple(problems), False, current.renamed)


def _over(
    tree: Mapping, base: Documents, files: tuple[tuple[str, str], ...], names: tuple[str, ...], problems: list[Problem]
) -> Documents:
    """A file's own tree merged over its base."""
    merged = tree if base.tree is None else merge_documents(base.tree, tree)
    found = (*problems, *base.problems)
    return Documents(merged, files + base.files, names + base.named, found, base.complete, base.renamed)


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
