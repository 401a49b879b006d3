"""FM interactions: the small products that combine a sample's embeddings, which one kernel can compute.

inner = x.transpose(1, 2) @ rank        # x (B, n, d), rank (n, r)
products = x @ inner                    # (B, n, r): all pairs, at low rank
compressed = compress @ x               # (B, c, d), weighted sums; optional
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from loka.graph.ir import FmInteraction, ForwardIR, Ref, RefKind, Statement
from loka.graph.patterns.linear_chain import readers_of
from loka.graph.trace.observed_shapes import Shape

_PRODUCTS = ("torch.matmul({0}, {1})", "torch.bmm({0}, {1})", "{0} @ {1}", "{0}.matmul({1})", "{0}.bmm({1})")
_TRANSPOSED = {f"{{0}}.transpose({a}, {b})" for a, b in ((1, 2), (2, 1), (-1, -2), (-2, -1))} | {"{0}.mT"}


def find_fm_interactions(forward: ForwardIR, shapes: Mapping[str, Shape]) -> tuple[FmInteraction, ...]:
    """The FM interactions of a forward, each as long as possible; `shapes` are those of the targets and arguments.

    Both matrices must be Parameters, and intermediate values must have no other readers. A forward that changes a
    tensor in place has none, as an interaction is computed in the place of its first statement.
    """
    if changes_in_place(forward.statements):
        return ()
    return tuple(_found(forward, shapes))


def changes_in_place(statements: Sequence[Statement]) -> bool:
    """True if a statement may change a tensor that another one reads."""
    return any(_writes(step) or step.target == "_" for step in statements)


def in_place_reason(statements: Sequence[Statement]) -> str | None:
    """The first statement that may change a tensor in place, and what to do about it; None where there is none."""
    odd = next((step for step in statements if changes_in_place([step])), None)
    if odd is None:
        return None
    if _writes(odd):
        return f"its forward changes a tensor in place: {odd.text()}; compute it out of place"
    return f"its forward may change a tensor in place where nothing reads the result: {odd.text()}; leave that out"


def _writes(step: Statement) -> bool:
    return step.op.endswith("_") or "inplace=True" in step.template


def _found(forward: ForwardIR, shapes: Mapping[str, Shape]) -> Iterator[FmInteraction]:
    statements, readers = forward.statements, readers_of(forward)
    places = {statement.target: place for place, statement in enumerate(statements)}
    mixed: set[str] = set()
    for outer, statement in enumerate(statements):
        x, inner_name = _operands(statement, RefKind.LOCAL, RefKind.LOCAL)
        inner = places.get(inner_name, outer)
        if inner >= outer or readers.get(inner_name) != {outer} or x in mixed:
            continue
        transposed_name, rank = _operands(statements[inner], RefKind.LOCAL, RefKind.ATTRIBUTE)
        transpose = places.get(transposed_name, inner)
        if transpose >= inner or readers.get(transposed_name) != {inner} or not _transposes(statements[transpose], x):
            continue
        made, transposed = shapes.get(statement.target, ()), shapes.get(transposed_name, ())
        if statements[inner].call is None or len(made) != 3 or len(transposed) != 3:
            continue
        (samples, n, r), (_, d, _) = made, transposed
        if samples is not None or n is None or r is None or d is None or rank == "":
            continue
        mixed.add(x)
        compress = _compressing(statements, shapes, x, d)
        first = transpose if compress is None else min(transpose, compress)
        c = shapes[statements[compress].target][1] if compress is not None else 0
        yield FmInteraction(first, transpose, inner, outer, compress, x, (n, d, r, c or 0))


def _operands(statement: Statement, first: RefKind, second: RefKind) -> tuple[str, str]:
    """Names of the operands of a matrix product with operands of these kinds; two empty names for other statements."""
    if statement.template not in _PRODUCTS or [ref.kind for ref in statement.operands] != [first, second]:
        return "", ""
    left, right = statement.operands
    return left.text, right.text


def _transposes(statement: Statement, x: str) -> bool:
    return statement.template in _TRANSPOSED and statement.operands == (Ref(RefKind.LOCAL, x),)


def _compressing(statements: Sequence[Statement], shapes: Mapping[str, Shape], x: str, d: int) -> int | None:
    """The first statement that computes weighted sums of x."""
    for place, statement in enumerate(statements):
        weight, right = _operands(statement, RefKind.ATTRIBUTE, RefKind.LOCAL)
        if not weight or right != x or statement.call is None:
            continue
        shape = shapes.get(statement.target, ())
        if len(shape) == 3 and shape[0] is None and shape[1] is not None and shape[2] == d:
            return place
    return None
