"""Regions: the statements around a site that can be fused with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from loka.graph.expression import PRODUCT, RefKind
from loka.graph.ir import ForwardIR, Region, Statement
from loka.graph.patterns.linear_chain import head_before, readers_of
from loka.graph.patterns.norm import TORCH_NORMS, norm_starting_at, over_other_dimensions
from loka.graph.sites.flow import ACTIVATIONS, ELEMENTWISE

NORMS = frozenset(TORCH_NORMS)  # over the last dimension
AROUND = NORMS | ACTIVATIONS | ELEMENTWISE  # what regions are made of, besides GEMMs and modules that kernels take
NORM_MODULES = tuple(norm.module for norm in TORCH_NORMS.values() if norm.module is not None)


def find_regions(forward: ForwardIR, wanted: Collection[str]) -> tuple[Region, ...]:
    """The region around each call of the wanted sites (names relative to the owner), in the order of the statements.

    A region extends over the statements that follow the site: norms over the last dimension, activations, and
    elementwise products and sums with earlier values; and over a norm just before it, or [norm] [activation] * matrix,
    if these are in no other region. It is the longest such run of which only the last target is read outside. A site
    whose product is permuted is a region of one operation.
    """
    statements = forward.statements
    readers = readers_of(forward)
    regions: list[Region] = []
    free = 0
    for index, statement in enumerate(statements):
        call = statement.call
        if call is None or call.site not in wanted or index < free:
            continue
        head = head_before(statements, readers, index, free)
        first, last = head.first if head is not None else index, index
        if call.out == PRODUCT:
            last = _end(statements, first, index, readers)
        regions.append(Region(call.site, first, last, tuple(s.op for s in statements[first : last + 1])))
        free = last + 1
    return tuple(regions)


def _end(statements: Sequence[Statement], first: int, site: int, readers: dict[str, set[int]]) -> int:
    """Index of the last statement of the longest region that starts at `first` and contains `site`."""
    end, inside = site, {statements[site].target}
    free = site + 1  # the statements before it are in the region
    for index in range(site + 1, len(statements)):
        statement = statements[index]
        run = norm_starting_at(statements, index) if index >= free else None
        if run is not None and run.last > index and run.source in inside:
            inside.update(statement.target for statement in statements[run.first : run.last + 1])
            free = run.last + 1
        reads = {ref.text for ref in statement.operands if ref.kind is RefKind.LOCAL}
        around = statement.op in AROUND or statement.called is not None
        known = around and statement.call is None and statement.target != "_"
        if index >= free and (not known or not reads & inside):
            break
        if statement.op in NORMS and (statement.operands[0].text not in inside or over_other_dimensions(statement, 1)):
            break
        inside.add(statement.target)
        if index + 1 < free:
            continue
        closed = (s.target for s in statements[first:index])
        if all(readers.get(target, set()) <= set(range(first, index + 1)) for target in closed):
            end = index
    return end
