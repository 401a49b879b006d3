"""Forwards in canonical form, for patterns; and back to the statements as they were traced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from loka.graph.canonical.blocks import rows_of_blocks
from loka.graph.canonical.columns import rows_of_columns
from loka.graph.canonical.convolutions import products_of_convolutions
from loka.graph.canonical.linears import canonical_linears
from loka.graph.canonical.parts import whole_of_parts
from loka.graph.canonical.reassociated import reassociated
from loka.graph.canonical.runs import canonical_runs
from loka.graph.canonical.single import rows_of_single
from loka.graph.canonical.sizes import numbers_in_norms, sizes_of_norms
from loka.graph.canonical.split_products import split_products
from loka.graph.canonical.transposed import rows_of_transposed
from loka.graph.canonical.turned import turned_linears
from loka.graph.ir import PART, ConcatNorm, Cross, FmInteraction, ForwardIR, Ref, RefKind, Region, Statement
from loka.graph.patterns.fm_interaction import find_fm_interactions
from loka.graph.patterns.linear_chain import readers_of
from loka.graph.patterns.region import ELEMENTWISE
from loka.graph.trace.observed_shapes import Shape

_VIEWS = frozenset({"flatten", "view", "reshape"})


def canonical_forward(
    forward: ForwardIR,
    shapes: Mapping[str, Shape],
    attributes: Mapping[str, tuple[int, ...]],
    idle: Collection[str] = (),
) -> tuple[ForwardIR, Mapping[str, Shape]]:
    """The forward in canonical form, as `_canonical` makes it; products are split where mixing layers take each part.

    Its arguments and result are those of `_canonical`.
    """
    found = _canonical(forward, shapes, attributes, idle, split=None)
    parts = {step.target for step in found[0].statements if step.op == PART}
    if not parts:
        return found
    mixed = {found[0].statements[place].target for mix in find_fm_interactions(*found) for place in mix.places}
    return found if parts <= mixed else _canonical(forward, shapes, attributes, idle, split=parts & mixed)


def _canonical(
    forward: ForwardIR,
    shapes: Mapping[str, Shape],
    attributes: Mapping[str, tuple[int, ...]],
    idle: Collection[str],
    split: Collection[str] | None,
) -> tuple[ForwardIR, Mapping[str, Shape]]:
    """The forward with runs of statements that compute a known function as one or two, and the shapes of its locals.

    It computes the same up to rounding. `shapes` are those of the locals, `attributes` those of Parameters and buffers
    by the expressions that read them, `idle` are targets of casts that change nothing; `split` names parts of products
    to be products of their own, None for all. A forward that sets a name twice stays as it is.
    """
    targets = [step.target for step in forward.statements if step.target != "_"]
    if len(set(targets)) < len(targets):
        return forward, shapes
    forward = replace(forward, statements=_without_casts(forward, idle))
    numbered = numbers_in_norms(forward.statements, shapes, readers_of(forward))
    forward = replace(forward, statements=numbered)
    products, matrices = products_of_convolutions(forward.statements, attributes)
    forward, attributes = replace(forward, statements=products), {**attributes, **matrices}
    divided = split_products(forward.statements, shapes, readers_of(forward), split)
    forward = replace(forward, statements=divided)
    forward = replace(forward, statements=_without_idle_views(forward, shapes))
    turned = turned_linears(forward.statements, shapes, readers_of(forward), attributes)
    forward = replace(forward, statements=turned)
    forward, shapes = rows_of_transposed(forward, shapes)
    forward, shapes = reassociated(forward, shapes)
    for in_rows in (rows_of_columns, rows_of_blocks, rows_of_single):
        rows = in_rows(forward.statements, shapes, readers_of(forward), attributes)
        forward, shapes = replace(forward, statements=rows.statements), {**shapes, **rows.shapes}
        attributes = {**attributes, **rows.attributes}
    for rule in (canonical_linears, canonical_runs, sizes_of_norms):
        made = rule(forward.statements, shapes, readers_of(forward), attributes)
        forward = replace(forward, statements=made)
    new = [step for step in forward.statements if step.written and step.target not in shapes]
    shapes = {**shapes, **{step.target: shapes[step.written[-1].target] for step in new}}  # the first of two for one
    return whole_of_parts(forward, shapes, attributes)


def _without_casts(forward: ForwardIR, idle: Collection[str]) -> tuple[Statement, ...]:
    """The statements with each idle cast as a part of the sum or product before it, if it alone reads that."""
    readers, made = readers_of(forward), list[Statement]()
    for place, step in enumerate(forward.statements):
        before = made[-1] if made else None
        plain = before is not None and before.op in ELEMENTWISE and before.call is None and not before.written
        alone = before is not None and step.operands[:1] == (Ref(RefKind.LOCAL, before.target),)
        alone = alone and before is not None and readers[before.target] == {place}
        if before is None or not (plain and alone and step.target in idle):
            made.append(step)
        else:
            made[-1] = replace(before, target=step.target, written=(before, step))
    return tuple(made)


def _without_idle_views(forward: ForwardIR, shapes: Mapping[str, Shape]) -> tuple[Statement, ...]:
    """The statements with each view that changes nothing, as `flatten(1)` of rows, as a part of its one reader."""
    readers, made = readers_of(forward), list[Statement]()
    for place, step in enumerate(forward.statements):
        before = made[-1] if made else None
        shape = () if before is None else shapes.get(before.target, ())
        if (
            before is not None
            and before.op in _VIEWS
            and before.call is None
            and len(before.operands) == 1
            and shape
            and shape == shapes.get(before.operands[0].text)
            and readers.get(before.target) == {place}
            and not step.written
            and not before.written
        ):
            same = {Ref(RefKind.LOCAL, before.target): before.operands[0]}
            operands = tuple(same.get(ref, ref) for ref in step.operands)
            made[-1] = replace(step, operands=operands, written=(before, step))
        else:
            made.append(step)
    return tuple(made)


def is_canonical(forward: ForwardIR) -> bool:
    """True if a statement stands for others."""
    return any(step.written for step in forward.statements)


def settled(forward: ForwardIR) -> ForwardIR:
    """The forward whose canonical statements are its own: nothing is traced back."""
    return replace(forward, statements=tuple(replace(step, written=()) for step in forward.statements))


def as_traced(forward: ForwardIR, kept: frozenset[int]) -> ForwardIR:
    """The forward with all canonical statements but those at `kept` as they were traced, patterns included."""
    statements: list[Statement] = []
    places: list[int] = []  # of the last statement that each became
    ends = {step.target: place for place, step in enumerate(forward.statements)}
    while len(places) < len(forward.statements):
        first = len(places)
        step = forward.statements[first]
        last = ends[step.written[-1].target] if step.written else first
        if step.written and kept.isdisjoint(range(first, last + 1)):
            statements += _traced(step)
            places += [len(statements) - 1] * (last + 1 - first)
        else:
            places += range(len(statements), len(statements) + last + 1 - first)
            statements += [replace(each, written=()) for each in forward.statements[first : last + 1]]
    return _moved(replace(forward, statements=tuple(statements)), places.__getitem__)


def _traced(step: Statement) -> list[Statement]:
    """The statements that canonical ones stand for, which may be canonical themselves."""
    return [inner for each in step.written for inner in (_traced(each) if each.written else [each])]


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
