"""Selection of the modules of a patch that go back to their own forward, or return from it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from loka.dispatch.dispatch_errors import BindError
from loka.errors import Code

_SHOWN = 3  # most names in a hint


def chosen_modules(
    package: str, verb: str, patterns: Sequence[str], modules: Sequence[tuple[str, ...]], known: Sequence[str]
) -> list[int]:
    """Indices of the modules whose sites all match the patterns; `modules` has the sites of each.

    `verb`: "keep" or "restore", for messages. `known`: all site names of the patch, including those already sent back.
    A pattern is a site's name, or a glob whose `*` crosses dots. Raises BindError for a pattern that matches nothing,
    and if the patterns match some sites of a module but not all: they share its forward, so one cannot go back without
    the others.
    """
    if not patterns:
        raise BindError(f"{package}: {verb} takes the names of sites, or globs over them", Code.ARGUMENT)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise BindError(
                f"{package}: {verb} takes names, each as an argument of its own, and {pattern!r} is none; write "
                f"patch.{verb}(*names) for several in a list",
                Code.ARGUMENT,
            )
    for pattern in patterns:
        if not any(fnmatchcase(site, pattern) for site in known):
            raise BindError(
                f"{package}: no site of this patch matches {pattern!r} ({_hint(pattern, known)})", Code.NO_MATCH
            )
    found, problems = [], []
    for number, sites in enumerate(modules):
        named = [site for site in sites if any(fnmatchcase(site, pattern) for pattern in patterns)]
        others = [site for site in sites if site not in named]
        if named and others:
            problems.append(
                f"{', '.join(named)}: shares one generated forward with {', '.join(others)}: name these too"
                + (", or write `compute: keep` for it in the policy and run loka generate" if verb == "keep" else "")
            )
        elif named:
            found.append(number)
    if problems:
        raise BindError(
            f"{package}: {verb}: not all of these sites can go alone; nothing was changed:",
            Code.SHARED_FORWARD,
            problems,
        )
    return found


def _hint(pattern: str, known: Sequence[str]) -> str:
    """Hint on similar names; a site that mods merged from several has their names joined by "+"."""
    close = difflib.get_close_matches(pattern, known, n=2, cutoff=0.4)
    hint = f"nearest: {', '.join(close)}" if close else f"there are {len(known)}: see patch.sites"
    merged = [site for site in known if "+" in site]
    return hint + (f"; mods made one of several linears: {', '.join(merged[:_SHOWN])}" if merged else "")
