"""Canonical form of matrix products: the same product has the same form, whichever way it is written.

A value is a node and an order of its axes. Nodes are the tensors that are taken as they are, and products of two nodes
that are summed over one axis of each. `x.transpose(1, 2) @ w`, `torch.einsum("bnd,nr->bdr", x, w)` and
`(w.t() @ x).mT` so are one node in one order, and `w.t() @ x` is the same node in another.

Values are those of the statements that are executed: nothing is reordered. Taken as it is, a tensor is what is no view
and no product, a product that several statements read, and a view of a local that nothing else reads: such values are
what a forward goes on with.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters

from loka.graph.ir import WEIGHTED, Ref, RefKind, Shape, Statement
from loka.graph.patterns.norm import literal, operand
from loka.graph.sites.products.einsum import without_dots

_MATMULS = ("matmul", "bmm", "mm")


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
    """The values of a forward's targets that are views or products.

    `shapes` are those of its locals, `readers` the places of the statements that read each. A name that is set twice,
    or whose number of dimensions differs between calls, has none. A Parameter in a product is a matrix: the statement
    of a GEMM (`SiteCall`), or a view of two dimensions.
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
        node = expression(statement)
        return self._view(statement, node) or self._product(statement, node) or self._gemm(statement)

    def _view(self, statement: Statement, node: ast.expr | None) -> Value | None:
        dimensions = len(self._shapes.get(statement.target, ()))
        moved = node is not None and dimensions and moved_axes(node, dimensions) is not None
        of_matrix = dimensions == 2 or all(ref.kind is RefKind.LOCAL for ref in statement.operands)
        return self._of(statement, node, dimensions) if node is not None and moved and of_matrix else None

    def _product(self, statement: Statement, node: ast.expr | None) -> Value | None:
        """A product of two tensors, each perhaps a view."""
        parts = _function(node)
        if parts is None:
            return None
        name, given = parts
        if name == "einsum":
            pair = given[1].elts if len(given) == 2 and isinstance(given[1], ast.List | ast.Tuple) else given[1:]
            labels = _einsum(literal(given[0]), [self._dimensions(statement, each) for each in pair])
        elif name in _MATMULS or (name == "linear" and (len(given) == 2 or ast.unparse(given[2]) == "None")):
            pair = given[:2] if name == "linear" else given
            sizes = [self._dimensions(statement, each) for each in pair]
            labels = _matmul(sizes[0], sizes[1], name == "linear") if len(pair) == 2 else None
        else:
            return None
        if labels is None or len(pair) != 2 or len(self._shapes.get(statement.target, ())) != len(labels[2]):
            return None
        a, b = (self._of(statement, each, len(own)) for each, own in zip(pair, labels[:2], strict=True))
        broadcast = a is None or b is None or not self._batches_agree(statement, pair, labels)
        return None if broadcast or a is None or b is None else _contracted(a, b, labels)

    def _gemm(self, statement: Statement) -> Value | None:
        """The product of a site, written in a way of its own."""
        call = statement.call
        if call is None or call.bias is not None:
            return None
        names = [f"operand_{number}" for number in range(len(statement.operands))]
        linear = f"torch.nn.functional.linear({call.x.format(*names)}, {call.weight.format(*names)})"
        product = self._product(statement, ast.parse(linear, mode="eval").body)
        order = None if product is None else _order(call.out, len(product.axes))
        if product is None or order is None:
            return None
        return Value(product.node, tuple(product.axes[axis] for axis in order))

    def _of(self, statement: Statement, node: ast.expr, dimensions: int) -> Value | None:
        """The value of an expression over a statement's operands, of so many dimensions."""
        ref = operand(statement, node)
        if ref is None:
            moved = moved_axes(node, dimensions)
            of = None if moved is None else self._of(statement, moved[0], dimensions)
            return None if of is None or moved is None else Value(of.node, tuple(of.axes[axis] for axis in moved[1]))
        found = self.values.get(ref.text) if ref.kind is RefKind.LOCAL else None
        if found is not None and not self._stands_alone(ref.text, found.node):
            return found if len(found.axes) == dimensions else None
        if ref.kind is RefKind.LOCAL and len(self._shapes.get(ref.text, ())) != dimensions:
            return None
        if ref.kind is RefKind.ATTRIBUTE and dimensions != 2:
            return None
        return Value(Source(ref), tuple(range(dimensions)))

    def _stands_alone(self, name: str, node: Node) -> bool:
        """True for a product that several statements read, and for the only view of a local."""
        if isinstance(node, Contraction):
            return len(self._readers.get(name, ())) > 1
        return node.ref.kind is RefKind.LOCAL and len(self._readers.get(node.ref.text, ())) < 2

    def _dimensions(self, statement: Statement, node: ast.expr) -> int:
        """The number of dimensions of an expression; 0 where it is unknown. Views do not change it."""
        ref = operand(statement, node)
        if ref is None:
            names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
            refs = [each for each in (operand(statement, name) for name in names) if each is not None]
            ref = refs[0] if len(refs) == 1 else None
        if ref is None or ref.kind is RefKind.LOCAL:
            return len(self._shapes.get(ref.text, ())) if ref is not None else 0
        return 2 if statement.call is not None or statement.op == WEIGHTED else 0

    def _batches_agree(self, statement: Statement, pair: Sequence[ast.expr], labels: tuple[str, str, str]) -> bool:
        """True if no axis that both operands have is broadcast; an operand with a Parameter has no batch."""
        sizes: dict[str, int | None] = {}
        for node, own in zip(pair, labels[:2], strict=True):
            ref = operand(statement, node)
            if ref is None or ref.kind is not RefKind.LOCAL:
                continue
            for label, size in zip(own, self._shapes[ref.text], strict=True):
                if sizes.setdefault(label, size) != size:
                    return False
        return True


def _order(out: str, dimensions: int) -> tuple[int, ...] | None:
    """The product's axis for each of its views' result, `out` being that of a `SiteCall`; None for other views."""
    node, order = ast.parse(out.format("product"), mode="eval").body, tuple(range(dimensions))
    while not isinstance(node, ast.Name):
        moved = moved_axes(node, dimensions)
        if moved is None:
            return None
        node, order = moved[0], tuple(moved[1][axis] for axis in order)
    return order


def _function(node: ast.expr | None) -> tuple[str, list[ast.expr]] | None:
    """The name and the arguments of a function or method; `a @ b` is a matmul."""
    if isinstance(node, ast.BinOp):
        return ("matmul", [node.left, node.right]) if isinstance(node.op, ast.MatMult) else None
    return None if node is None else called(node)


def _matmul(a: int, b: int, transposed: bool) -> tuple[str, str, str] | None:
    """Labels of `a @ b` for operands of so many dimensions; `transposed`: of `linear(a, b)`."""
    if min(a, b) < 2 or (transposed and b != 2) or (min(a, b) > 2 and a != b):
        return None
    rest = ascii_letters[: max(a, b) - 2]
    left = (rest if a > 2 else "") + "XY"
    right = (rest if b > 2 else "") + ("ZY" if transposed else "YZ")
    return left, right, rest + "XZ"


def _einsum(equation: object, dimensions: Sequence[int]) -> tuple[str, str, str] | None:
    if not isinstance(equation, str) or equation.count("->") != 1:
        return None
    inputs, out = without_dots(equation, dimensions).replace(" ", "").split("->")
    terms = inputs.split(",")
    if len(terms) != 2 or not all(term.isalpha() for term in (*terms, out)):
        return None
    return terms[0], terms[1], out


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


_SWAPS = ("transpose", "swapaxes", "swapdims")
_MOVES = ("movedim", "moveaxis")
_PLAIN = ("contiguous",)  # the same values in another layout of memory
_NAMES = frozenset({*_SWAPS, *_MOVES, *_PLAIN, "permute", "T", "mT", "t"})


def expression(statement: Statement) -> ast.expr | None:
    """A statement's expression, with operand i as the name `operand_i`; None where it is none."""
    names = [f"operand_{number}" for number in range(len(statement.operands))]
    try:
        return ast.parse(statement.template.format(*names), mode="eval").body
    except (SyntaxError, ValueError, IndexError, KeyError):
        return None


def called(node: ast.expr) -> tuple[str, list[ast.expr]] | None:
    """The name of a function of torch, or of a tensor's method, and its arguments, the tensor first.

    An attribute (`x.mT`) is a method without arguments. None for other expressions, and for keywords but those of last
    arguments (`dims`, `dim0` and `dim1`, `other`, `mat2`): with `input` named, the order would be another.
    """
    if isinstance(node, ast.Attribute):
        return node.attr, [node.value]
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    if any(keyword.arg not in ("dims", "dim0", "dim1", "other", "mat2") for keyword in node.keywords):
        return None
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    owner = ast.unparse(node.func.value)
    if owner in ("torch", "torch.nn.functional"):
        return node.func.attr, given
    return node.func.attr, [node.func.value, *given]


def only_moves_axes(statement: Statement) -> bool:
    """True for a view that moves axes of one tensor, without a check of its arguments."""
    node = expression(statement)
    parts = None if node is None else called(node)
    return parts is not None and parts[0] in _NAMES and len(statement.operands) == 1


def moved_axes(node: ast.expr, dimensions: int) -> tuple[ast.expr, tuple[int, ...]] | None:
    """What a view moves: its tensor, and for each axis of the result the tensor's; None for another expression.

    `dimensions` is the number of dimensions of both.
    """
    parts = called(node)
    if parts is None or not parts[1]:
        return None
    name, (tensor, *given) = parts
    if name == "einsum":
        order = _renamed(literal(tensor), dimensions) if len(given) == 1 else None
        return None if order is None else (given[0], order)
    order = _moved(name, [literal(each) for each in given], dimensions)
    return None if order is None else (tensor, order)


def _moved(name: str, given: list[object], dimensions: int) -> tuple[int, ...] | None:
    axes = list(range(dimensions))
    if name in _PLAIN and not given:
        return tuple(axes)
    if (name in ("T", "t") and dimensions == 2) or name == "mT":
        given, name = [-2, -1], "transpose"
    if name == "permute":
        order = list(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else given
        numbers = [each % dimensions for each in order if type(each) is int]
        return tuple(numbers) if sorted(numbers) == axes and len(order) == dimensions else None
    if len(given) != 2 or not all(type(each) is int and -dimensions <= each < dimensions for each in given):
        return None
    a, b = (each % dimensions for each in given if isinstance(each, int))
    if name in _SWAPS:
        axes[a], axes[b] = axes[b], axes[a]
        return tuple(axes)
    if name in _MOVES:
        axes.insert(b, axes.pop(a))
        return tuple(axes)
    return None


def _renamed(equation: object, dimensions: int) -> tuple[int, ...] | None:
    """The order of a view written as `torch.einsum("bnd->bdn", x)`."""
    before, _, after = equation.replace(" ", "").partition("->") if isinstance(equation, str) else ("", "", "")
    if not before.isalpha() or len(before) != dimensions or len(set(before)) != dimensions:
        return None
    return tuple(before.index(label) for label in after) if sorted(before) == sorted(after) else None
