"""Patterns that match nothing, with what was probably meant."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Sequence

from loka.policy.cascade.settings import SiteFacts
from loka.policy.policy import Match, Pattern, Rule, SizeBound
from loka.policy.problems import Problem, problem

MAX_CANDIDATES = 2000
MAX_HINTS = 3
_NO_GEMM = "the model has no GEMM: correct the factory"


def unmatched_patterns(rules: Sequence[Rule], facts: Sequence[SiteFacts]) -> list[Problem]:
    """A problem for each pattern, and each mapping as a whole, that no site matches; `optional` excuses it."""
    problems: list[Problem] = []
    names = [site.name for site in facts]
    candidates: list[str] | None = None
    for rule in rules:
        if rule.optional:
            continue
        dead = [pattern for pattern in rule.match.patterns if not any(map(pattern.compiled.fullmatch, names))]
        if dead and candidates is None:
            candidates = _candidates(names)
        for pattern in dead:
            message = f"{pattern.text!r} matches no site; {_hint(pattern, candidates or [], _NO_GEMM)}"
            problems.append(problem(pattern.place, f"{message}, or set optional: true"))
        if not dead and not any(map(rule.match.matches, facts)):
            message = f"no site is {rule.match.text}; {_what_there_is(rule.match, facts)}, or set optional: true"
            problems.append(problem(rule.place, message))
    return problems


def hint(pattern: Pattern, names: Sequence[str], nothing: str) -> str:
    """What to write instead of a pattern that matches none of some names; `nothing` where there is no name."""
    return _hint(pattern, _candidates(names), nothing)


def _hint(pattern: Pattern, candidates: list[str], nothing: str) -> str:
    if not candidates:
        return nothing
    word = _as_glob(pattern.text)
    close = difflib.get_close_matches(word, candidates, n=MAX_HINTS, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}? Correct it"
    shown = ", ".join(map(repr, candidates[:MAX_HINTS]))
    return f"the model has, for example, {shown}: correct it"


def _candidates(names: Sequence[str]) -> list[str]:
    """Patterns that match something: names with their numbers starred, the names themselves, and what begins them."""
    starred = dict.fromkeys(_starred(name) for name in names)
    begins = dict.fromkeys(
        ".".join([*parts[:length], "*"])
        for parts in (name.split(".") for name in starred)
        for length in range(1, len(parts))
    )
    return list(dict.fromkeys([*starred, *begins, *names]))[:MAX_CANDIDATES]


def _starred(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _as_glob(text: str) -> str:
    """A regular expression roughly as a glob, so that it can be compared with names."""
    if not text.startswith("re:"):
        return text[:200]
    return re.sub(r"(\\d|\.|\[[^\]]*\])[*+]", "*", text[3:203]).replace("\\.", ".").strip("^$")


def _what_there_is(match: Match, facts: Sequence[SiteFacts]) -> str:
    """The kinds and the ranges of the model, as far as the mapping asks about them."""
    if not facts:
        return _NO_GEMM
    parts = []
    if match.kind is not None:
        counts = Counter(site.kind for site in facts)
        parts.append("its kinds are " + ", ".join(f"{kind} ({count})" for kind, count in sorted(counts.items())))
    parts += [f"its {bound.field} goes from {_span(bound, facts)}" for bound in match.bounds]
    return "of the model, " + " and ".join(parts or ["no site has all of it"]) + ": correct the match"


def _span(bound: SizeBound, facts: Sequence[SiteFacts]) -> str:
    values = [getattr(site, bound.field) for site in facts]
    return f"{min(values):.4g} to {max(values):.4g}" if bound.field == "share" else f"{min(values)} to {max(values)}"
