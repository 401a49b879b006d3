"""Pairwise testing: a few of many cases, in which every pair of parameter values of all of them still occurs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")


def fields_of(spec: Any) -> dict[str, Hashable]:
    """The parameters of a dataclass, and which one it is."""
    return {"": type(spec), **{field.name: getattr(spec, field.name) for field in fields(spec)}}


def pairwise(cases: Iterable[T], parameters: Callable[[T], Mapping[str, Hashable]] = fields_of) -> list[T]:
    """Cases, in their order, that together have every pair of values of two parameters that any of `cases` has."""
    left = dict.fromkeys(cases)
    known = {case: sorted(parameters(case).items(), key=_name) for case in left}
    # A parameter with one value is in every pair's case, and only changes which of several equal choices is made.
    values = {item for items in known.values() for item in items}
    counts = Counter(name for name, _ in values)
    varied = {name for name, count in counts.items() if count > 1}
    names = varied if len(varied) > 1 else set(counts)
    pairs = {case: set(itertools.combinations([it for it in known[case] if it[0] in names], 2)) for case in left}
    wanted = set[Any]().union(*pairs.values())
    chosen: set[T] = set()
    while wanted:
        best = max(left, key=lambda case: len(pairs[case] & wanted))
        chosen.add(best)
        wanted -= pairs[best]
    return [case for case in left if case in chosen]


def _name(item: tuple[str, Hashable]) -> str:
    return item[0]
