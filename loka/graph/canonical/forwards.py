"""Forwards in canonical form, for patterns; and back to the statements as they were traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from loka.graph.canonical.emission import emitted
from loka.graph.canonical.lowering import lowered
from loka.graph.canonical.nodes import Value
from loka.graph.canonical.recording import Run
from loka.graph.canonical.views import CannotEmitError
from loka.graph.expression import Arg, RefKind, locals_in
from loka.graph.ir import (
    PART,
    ConcatNorm,
    Cross,
    FmInteraction,
    ForwardIR,
    Region,
    Shape,
    Statement,
)
from loka.graph.patterns.fm_interaction import find_fm_interactions
from loka.graph.sites.weights import Index


def canonical_forward(
    forward: ForwardIR,
    shapes: Mapping[str, Shape],
    runs: Sequence[Run],
    names: Mapping[str, str],
    sites: Mapping[str, tuple[str, Index]],
    barred: frozenset[str] = frozenset(),
) -> tuple[ForwardIR, Mapping[str, Shape]]:
    """The forward in canonical form, and the shapes of its locals; as it was traced where it has no such form.

    `shapes` are those of the locals as traced, `runs` what `recorded` gives, `names` the expressions of Parameters and
    buffers by name, `sites` as in `with_site_calls`. `barred` are targets of statements that are taken as they are. It
    computes the same up to rounding. A product is split where mixing layers take each part, and nothing reads it as a
    whole.
    """
    targets = [step.target for step in forward.statements if step.target != "_"]
    if not runs or len(set(targets)) < len(targets):
        return forward, shapes
    for split in (True, False):
        try:
            found = _canonical(forward, shapes, runs, names, sites, barred, split)
        except CannotEmitError:
            continue
        if _splits_pay(*found):
            return found
    return forward, shapes


def _splits_pay(forward: ForwardIR, shapes: Mapping[str, Shape]) -> bool:
    """True if mixing layers take all parts of products, and no product is there as a whole, too."""
    calls = [(step.op == PART, step.call.site) for step in forward.statements if step.call is not None]
    if {site for is_part, site in calls if is_part} & {site for is_part, site in calls if not is_part}:
        return False
    parts = {step.target for step in forward.statements if step.op == PART}
    mixes = find_fm_interactions(forward, shapes) if parts else ()
    return parts <= {forward.statements[place].target for mix in mixes for place in mix.places}


def _canonical(
    forward: ForwardIR,
    shapes: Mapping[str, Shape],
    runs: Sequence[Run],
    names: Mapping[str, str],
    sites: Mapping[str, tuple[str, Index]],
    barred: frozenset[str],
    split: bool,
) -> tuple[ForwardIR, Mapping[str, Shape]]:
    graph = lowered(forward.statements, runs, names, sites, barred, split)
    by_target = {step.target: graph.made[place] for place, step in enumerate(forward.statements)}
    read = locals_in(forward.result)
    values: dict[str, Value] = {name: value for name in read if (value := by_target.get(name)) is not None}
    made = emitted(forward.statements, forward.result, list(runs[0].arguments), graph, values)
    statements = in_groups(forward.statements, made.statements, forward.result)
    return replace(forward, statements=statements), {**shapes, **made.shapes}


def is_canonical(forward: ForwardIR) -> bool:
    """True if a statement stands for others."""
    return any(step.written for step in forward.statements)


def with_traced_relus(forward: ForwardIR) -> ForwardIR:
    """The forward with each ReLU that stands for statements of its own as these: their gradients at 0 may differ."""
    steps = [step.written if (step.op, step.group) == ("relu", 1) else (step,) for step in forward.statements]
    return replace(forward, statements=tuple(each for written in steps for each in written))


def settled(forward: ForwardIR) -> ForwardIR:
    """The forward whose canonical statements are its own: nothing is traced back."""
    return replace(forward, statements=tuple(replace(step, written=(), group=None) for step in forward.statements))


def as_traced(forward: ForwardIR, kept: frozenset[int]) -> ForwardIR:
    """The forward with all canonical statements but those at `kept` as they were traced, patterns included."""
    statements: list[Statement] = []
    places: list[int] = []  # of the last statement that each became
    while len(places) < len(forward.statements):
        first = len(places)
        step = forward.statements[first]
        last = first + (step.group or 1) - 1
        if step.written and kept.isdisjoint(range(first, last + 1)):
            statements += step.written
            places += [len(statements) - 1] * (last + 1 - first)
        else:
            places += range(len(statements), len(statements) + last + 1 - first)
            statements += [replace(each, written=(), group=None) for each in forward.statements[first : last + 1]]
    return _moved(replace(forward, statements=tuple(statements)), places.__getitem__)


def _moved(forward: ForwardIR, to: Callable[[int], int]) -> ForwardIR:
    """The forward with other places of the statements in its patterns."""

    def all_to(places: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(to, places))

    def region(each: Region) -> Region:
        return replace(each, first=to(each.first), last=to(each.last))

    def mix(each: FmInteraction) -> FmInteraction:
        compress = None if each.compress is None else to(each.compress)
        skipped, gemms = all_to(each.skipped), all_to(each.gemms)
        return replace(
            each, first=to(each.first), outer=to(each.outer), compress=compress, skipped=skipped, gemms=gemms
        )

    def join(each: ConcatNorm) -> ConcatNorm:
        return replace(each, norm=to(each.norm), skipped=all_to(each.skipped))

    def cross(each: Cross) -> Cross:
        return replace(each, sum=to(each.sum), skipped=all_to(each.skipped), linear=to(each.linear))

    return replace(
        forward,
        regions=tuple(map(region, forward.regions)),
        mixes=tuple(map(mix, forward.mixes)),
        joins=tuple(map(join, forward.joins)),
        crosses=tuple(map(cross, forward.crosses)),
    )


def in_groups(traced: Sequence[Statement], canonical: Sequence[Statement], result: Arg) -> tuple[Statement, ...]:
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


def _cuts(traced: Sequence[Statement], canonical: Sequence[Statement], result: Arg) -> list[tuple[int, int]]:
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
    before, ours = ([step.form for step in steps if step.target == "_"] for steps in (traced[:old], canonical[:new]))
    every = Counter(step.form for step in canonical if step.target == "_")
    return Counter(ours) == Counter(before) & every


def _needs(steps: Sequence[Statement], result: Arg, names: set[str]) -> list[set[str]]:
    """For each place, the locals of the forward that it and the statements after it read, and do not set."""
    read = set(locals_in(result)) & names
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
