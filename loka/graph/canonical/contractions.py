"""Products of tensors in a canonical forward, and views of these: the same product in any order of axes is one.

A value is a node and an order of its axes. Nodes are the tensors that are taken as they are, and products of two nodes
that are summed over one axis of each. Values are those of the statements that are executed: nothing is reordered. Taken
as it is, a tensor is what is no view and no product, a product that several statements read, and a view of a local that
nothing else reads: such values are what a forward goes on with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters

from loka.graph.expression import Arg, Call, Ref, RefKind
from loka.graph.ir import WEIGHTED, Shape, Statement


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor taken as it is: a local, or a Parameter."""

    ref: Ref


@dataclass(frozen=True, slots=True)
class Contraction:
    """The product of two nodes, summed over one axis of each.

    Its axes: the batch axes, then the other axes of `left`, then those of `right`, each in the order of the node's own.
    Locals come before products, and these before Parameters, so that there is one form of both orders.
    """

    left: Node
    right: Node
    contracted: tuple[int, int]  # axis of left, axis of right
    batch: tuple[tuple[int, int], ...]  # axes of left and right that go along


Node = Source | Contraction


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of a forward: axis i of it is axis `axes[i]` of its node."""

    node: Node
    axes: tuple[int, ...]


def canonical_values(
    statements: Sequence[Statement], shapes: Mapping[str, Shape], readers: Mapping[str, Collection[int]]
) -> Mapping[str, Value]:
    """The values of a canonical forward's targets that are views or products.

    `shapes` are those of its locals, `readers` the places of the statements that read each. A name that is set twice,
    or whose number of dimensions differs between calls, has none.
    """
    known = _Known(shapes, readers)
    once = Counter(statement.target for statement in statements)
    for statement in statements:
        if once[statement.target] == 1 and (value := known.made_by(statement)) is not None:
            known.values[statement.target] = value
    return known.values


class _Known:
    """Values of the statements so far."""

    def __init__(self, shapes: Mapping[str, Shape], readers: Mapping[str, Collection[int]]) -> None:
        self.values: dict[str, Value] = {}
        self._shapes, self._readers = shapes, readers

    def made_by(self, statement: Statement) -> Value | None:
        """The value of a statement that is a view or a product."""
        return self._view(statement) or self._gemm(statement) or self._product(statement)

    def _view(self, statement: Statement) -> Value | None:
        """A local with its axes in another order."""
        of = self._of(statement.operands[0]) if len(statement.operands) == 1 else None
        order = None if of is None else _order(statement.value, len(of.axes))
        return None if of is None or order is None else Value(of.node, tuple(of.axes[axis] for axis in order))

    def _gemm(self, statement: Statement) -> Value | None:
        """The product of a local with a Parameter, without a bias."""
        value = statement.value
        if not isinstance(value, Call) or value.target != "torch.nn.functional.linear" or len(value.args) != 2:
            return None
        of, weight = value.args
        flipped = isinstance(weight, Call) and weight.target == ".t"
        weight = weight.args[0] if isinstance(weight, Call) and flipped else weight
        x = self._of(of) if isinstance(of, Ref) else None
        if x is None or not isinstance(weight, Ref) or weight.kind is not RefKind.ATTRIBUTE:
            return None
        if statement.call is None and statement.op != WEIGHTED:
            return None
        lead = ascii_letters[: len(x.axes) - 1]
        matrix = Value(Source(weight), (0, 1))
        return _contracted(x, matrix, (f"{lead}Y", "YZ" if flipped else "ZY", f"{lead}Z"))

    def _product(self, statement: Statement) -> Value | None:
        """The product of two locals, each perhaps a view."""
        value = statement.value
        if not isinstance(value, Call) or value.target != "torch.matmul" or value.args != statement.operands:
            return None
        a, b = map(self._of, statement.operands)
        shapes = [self._shapes[ref.text][:-2] for ref in statement.operands if a is not None and b is not None]
        if a is None or b is None or len(a.axes) < 2 or shapes[0] != shapes[1]:  # broadcast
            return None
        lead = ascii_letters[: len(a.axes) - 2]
        return _contracted(a, b, (f"{lead}XY", f"{lead}YZ", f"{lead}XZ"))

    def _of(self, ref: Ref) -> Value | None:
        """The value of a local."""
        dimensions = len(self._shapes.get(ref.text, ()))
        if ref.kind is not RefKind.LOCAL or not dimensions:
            return None
        found = self.values.get(ref.text)
        if found is not None and not self._stands_alone(ref.text, found.node):
            return found
        return Value(Source(ref), tuple(range(dimensions)))

    def _stands_alone(self, name: str, node: Node) -> bool:
        """True for a product that several statements read, and for the only view of a local."""
        if isinstance(node, Contraction):
            return len(self._readers.get(name, ())) > 1
        return node.ref.kind is RefKind.LOCAL and len(self._readers.get(node.ref.text, ())) < 2


_MOVES = frozenset(
    ("transpose", "permute", "t", "T", "mT", "movedim", "moveaxis", "swapaxes", "swapdims", "contiguous")
)


def only_moves_axes(statement: Statement) -> bool:
    """True for a view that moves axes of one tensor, without a check of its arguments."""
    return statement.op in _MOVES and len(statement.operands) == 1


def _order(value: Arg, dimensions: int) -> tuple[int, ...] | None:
    """For each axis of a view that moves axes, the axis of the tensor; None for another operation."""
    order = list(range(dimensions))
    if isinstance(value, Call) and value.target == ".contiguous":
        value = value.args[0]
        if isinstance(value, Ref):
            return tuple(order)
    if not isinstance(value, Call) or not isinstance(value.args[0], Ref):
        return None
    given = [each for each in value.args[1:] if type(each) is int]
    if value.target == ".permute":
        return tuple(given) if sorted(given) == order else None
    if value.target not in (".transpose", ".t"):
        return None
    a, b = given or (0, 1)
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def _contracted(a: Value, b: Value, labels: tuple[str, str, str]) -> Value | None:
    """The product of two values; None unless it is summed over one axis of each, and nothing else."""
    left, right, out = (list(each) for each in labels)
    both = set(left) & set(right)
    summed = both - set(out)
    every = set(left) | set(right)
    if len(summed) != 1 or every - summed != set(out):
        return None
    if any(len(set(each)) != len(each) for each in (left, right, out)):
        return None
    if _rank(b.node) < _rank(a.node):
        a, b, left, right = b, a, right, left
    of_a = {label: a.axes[place] for place, label in enumerate(left)}
    of_b = {label: b.axes[place] for place, label in enumerate(right)}
    (over,) = summed
    batch = sorted(both - summed, key=of_a.__getitem__)
    own = [sorted(set(of) - both, key=of.__getitem__) for of in (of_a, of_b)]
    order = [*batch, *own[0], *own[1]]
    node = Contraction(a.node, b.node, (of_a[over], of_b[over]), tuple((of_a[each], of_b[each]) for each in batch))
    return Value(node, tuple(order.index(label) for label in out))


def _rank(node: Node) -> tuple[int, str]:
    if isinstance(node, Contraction):
        return 1, repr(node)
    return (0 if node.ref.kind is RefKind.LOCAL else 2), node.ref.text
