"""Canonical statements in groups, each of which stands for a run of statements as they were traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from loka.graph.ir import RefKind, Statement
from loka.graph.trace.printer import names_in


def in_groups(traced: Sequence[Statement], canonical: Sequence[Statement], result: str) -> tuple[Statement, ...]:
    """The canonical statements, each first one of a group with what the group stands for in `written`.

    A group is as short as possible: what is before and after it reads the same locals, whichever of the two forms is
    taken. Statements that are the same in both stand for themselves.
    """
    made: list[Statement] = []
    begin = (0, 0)
    for end in _cuts(traced, canonical, result):
        old, new = traced[begin[0] : end[0]], canonical[begin[1] : end[1]]
        if list(old) != list(new):
            new = [replace(new[0], written=tuple(old), group=len(new)), *new[1:]]
        made += new
        begin = end
    return tuple(made)


def _cuts(traced: Sequence[Statement], canonical: Sequence[Statement], result: str) -> list[tuple[int, int]]:
    """Where both forms can be cut, from the first such place to the ends."""
    names = [{step.target for step in steps} for steps in (traced, canonical)]
    old_needs, new_needs = (_needs(s, result, n) for s, n in zip((traced, canonical), names, strict=True))
    old_made, new_made = _made(traced), _made(canonical)
    found: list[tuple[int, int]] = []
    last = 0
    for old in range(1, len(traced) + 1):
        for new in range(last + 1, len(canonical) + 1):
            both = old_needs[old] <= new_made[new] and new_needs[new] <= old_made[old]
            if both and (old, new) != (len(traced), len(canonical)) and _same_effects(traced, canonical, old, new):
                found.append((old, new))
                last = new
                break
    while found and found[-1][1] == len(canonical):
        found.pop()
    return [*found, (len(traced), len(canonical))]


def _same_effects(traced: Sequence[Statement], canonical: Sequence[Statement], old: int, new: int) -> bool:
    """True if the same statements without a target are before a cut in both forms, but for those left out in one."""
    before, ours = (
        [step.template for step in steps if step.target == "_"] for steps in (traced[:old], canonical[:new])
    )
    every = Counter(step.template for step in canonical if step.target == "_")
    return Counter(ours) == Counter(before) & every


def _needs(steps: Sequence[Statement], result: str, names: set[str]) -> list[set[str]]:
    """For each place, the locals of the forward that it and the statements after it read, and do not set."""
    read = names_in(result, names)
    found = [set(read)]
    for step in reversed(steps):
        read = (read - {step.target}) | {
            ref.text for ref in step.operands if ref.kind is RefKind.LOCAL and ref.text in names
        }
        found.append(set(read))
    return found[::-1]


def _made(steps: Sequence[Statement]) -> list[set[str]]:
    made: set[str] = set()
    found = [set(made)]
    for step in steps:
        made = made | {step.target}
        found.append(set(made))
    return found
