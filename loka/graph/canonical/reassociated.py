"""Products of a Gram matrix, `(x @ x^T) @ rank`, as `x @ (x^T @ rank)`: the same by associativity, and less work.

Rounding differs, as sums are taken in another order. So this form is for mixing layers alone (`fm_interaction`): what
no kernel takes is executed as it was traced. One einsum of all three is two products, for which the same holds.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from loka.graph.canonical.contractions import Contraction, Node, Source, Value, canonical_values
from loka.graph.canonical.parts import traced_of
from loka.graph.canonical.views import expression
from loka.graph.ir import REASSOCIATED, ForwardIR, Ref, RefKind, SiteCall, Statement
from loka.graph.patterns.fm_interaction import changes_in_place
from loka.graph.patterns.linear_chain import readers_of
from loka.graph.trace.observed_shapes import Shape
from loka.sites.products.einsum import without_dots

_EINSUM = "torch.einsum("


def reassociated(forward: ForwardIR, shapes: Mapping[str, Shape]) -> tuple[ForwardIR, Mapping[str, Shape]]:
    """The forward with each product of a Gram matrix and a Parameter as two products of x, and its locals' shapes.

    x is (samples, embeddings, dimension), and nothing else reads the Gram matrix, (samples, embeddings, embeddings).
    Both products stand in the place of the one with the Parameter. Nothing may change in place between these
    statements, and two products of x must not be more work.
    """
    forward, shapes = _einsums_in_two(forward, shapes)
    statements, readers = forward.statements, readers_of(forward)
    values = canonical_values(statements, shapes, readers)
    made: dict[int, tuple[Statement, ...]] = {}
    new: dict[str, Shape] = {}
    for place, step in enumerate(statements):
        value = values.get(step.target)
        found = None if step.call is None or value is None else _gram_product(value.node)
        if step.call is None or value is None or found is None:
            continue
        samples, embeddings, dimension = shapes[found.x.text]
        rank = shapes[step.target][value.axes.index(2)]
        inside = _inside(place, found.x.text, statements, values, readers)
        if changes_in_place(statements[min(inside) : place + 1]) or not saves_work(embeddings, dimension, rank):
            continue
        name = _fresh(f"{step.target}_inner", {**shapes, **new})
        new[name] = (samples, dimension, rank)
        written = tuple(traced_of([statements[each] for each in sorted(inside)]))
        made.update(dict.fromkeys(inside, ()))
        made[place] = (found.inner(name, step.call.site, written), found.outer(name, step, value))
    steps = tuple(each for place, step in enumerate(statements) for each in made.get(place, (step,)))
    return replace(forward, statements=steps), {**shapes, **new}


def _einsums_in_two(forward: ForwardIR, shapes: Mapping[str, Shape]) -> tuple[ForwardIR, Mapping[str, Shape]]:
    """The forward with each GEMM whose input is an einsum of its operands in two statements; and the shapes."""
    made: list[Statement] = []
    new: dict[str, Shape] = {}
    for step in forward.statements:
        shape = _einsum_shape(step, shapes) if step.call is not None and step.call.x.startswith(_EINSUM) else None
        if step.call is None or shape is None:
            made.append(step)
            continue
        first = Ref(RefKind.LOCAL, _fresh(f"{step.target}_input", {**shapes, **new}))
        new[first.text] = shape
        read = tuple(ref for ref in step.operands if ref.kind is RefKind.LOCAL)
        places = {place: f"{{{read.index(ref)}}}" for place, ref in enumerate(step.operands) if ref in read}
        weight = next(ref for ref in step.operands if ref.kind is RefKind.ATTRIBUTE)
        texts = [places.get(place, "{1}") for place in range(len(step.operands))]
        call = SiteCall(step.call.site, "{0}", step.call.weight.format(*texts), None, step.call.out)
        text = call.out.format(f"torch.nn.functional.linear({{0}}, {call.weight})")
        made.append(Statement(first.text, "einsum", step.call.x.format(*texts), read, note=step.note, written=(step,)))
        made.append(Statement(step.target, "linear", text, (first, weight), call, step.note))
    return replace(forward, statements=tuple(made)), {**shapes, **new}


def _einsum_shape(step: Statement, shapes: Mapping[str, Shape]) -> Shape | None:
    """The shape of the einsum that a GEMM reads; None if that has views around it, or its operands are no locals."""
    attributes = sum(ref.kind is RefKind.ATTRIBUTE for ref in step.operands)
    of_input = replace(step, template=step.call.x) if step.call is not None else step
    node = expression(of_input)
    if attributes != 1 or not isinstance(node, ast.Call) or not isinstance(node.args[0], ast.Constant):
        return None
    given = [step.operands[int(ast.unparse(each).removeprefix("operand_"))] for each in node.args[1:]]
    known = [shapes.get(ref.text, ()) for ref in given]
    inputs, _, output = without_dots(str(node.args[0].value), [len(each) for each in known]).partition("->")
    sizes: dict[str, int | None] = {}
    for term, shape in zip(inputs.split(","), known, strict=True):
        sizes.update(zip(term, shape, strict=False))
    return tuple(sizes[label] for label in output) if set(output) <= set(sizes) else None


@dataclass(frozen=True, slots=True)
class _GramProduct:
    """The product of x @ x^T and a Parameter."""

    x: Ref
    rank: Ref
    flipped: bool  # the Parameter is (embeddings, rank)

    def inner(self, name: str, site: str, written: tuple[Statement, ...]) -> Statement:
        """x^T @ rank, for all of these statements."""
        weight = "{1}.t()" if self.flipped else "{1}"
        call = SiteCall(site, "{0}.transpose(1, 2)", weight, None, "{0}")
        text = f"torch.nn.functional.linear({call.x}, {weight})"
        return Statement(name, REASSOCIATED, text, (self.x, self.rank), call, written[-1].note, written=written)

    def outer(self, inner: str, step: Statement, value: Value) -> Statement:
        """x @ inner, with the axes of the value that it stands for."""
        straight = value.axes == (0, 1, 2)
        text = "torch.matmul({0}, {1})" if straight else "torch.einsum('bnd,bdr->brn', {0}, {1})"
        return Statement(
            step.target, "matmul" if straight else "einsum", text, (self.x, Ref(RefKind.LOCAL, inner)), note=step.note
        )


def _gram_product(node: Node) -> _GramProduct | None:
    """The parts of (x @ x^T) @ rank, where x @ x^T sums over the last dimension of x; None for another product."""
    if not isinstance(node, Contraction) or not isinstance(node.right, Source) or node.batch:
        return None
    gram = node.left
    if node.right.ref.kind is not RefKind.ATTRIBUTE or not isinstance(gram, Contraction):
        return None
    if not isinstance(gram.left, Source) or gram.right != gram.left or gram.left.ref.kind is not RefKind.LOCAL:
        return None
    if (gram.contracted, gram.batch) != ((2, 2), ((0, 0),)) or node.contracted[0] == 0:
        return None
    return _GramProduct(gram.left.ref, node.right.ref, node.contracted[1] == 0)


def _inside(
    last: int,
    x: str,
    statements: Sequence[Statement],
    values: Mapping[str, Value],
    readers: Mapping[str, Collection[int]],
) -> set[int]:
    """The places of a product, and of the products and views of x that it alone needs."""
    inside = {last}
    for place in range(last - 1, -1, -1):
        target = statements[place].target
        if target != x and target in values and readers.get(target) and inside.issuperset(readers[target]):
            inside.add(place)
    return inside


def saves_work(embeddings: int | None, dimension: int | None, rank: int | None) -> bool:
    """True if two products of x multiply no more numbers than the Gram matrix and its product."""
    if embeddings is None or dimension is None or rank is None:
        return False
    return 2 * dimension * rank <= embeddings * (dimension + rank)


def _fresh(name: str, taken: Collection[str]) -> str:
    while name in taken:
        name += "_"
    return name
