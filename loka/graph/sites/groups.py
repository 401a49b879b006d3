"""Products with a Parameter that holds a matrix for each of several groups, as a product for each group.

x (B, 2, I), W (2, I, O), b (2, O)                x_0, x_1 = x.unbind(1)
y = einsum("bti,tio->bto", x, W)           ->     y_0, y_1 = einsum("bi,io->bo", x_0, W[0]), ...
z = einsum("bto,toi->bti", gelu(y + b), V)        z = stack([einsum("bo,oi->bi", gelu(y_0 + b[0]), V[0]), ...], 1)

Each matrix is then the weight of a GEMM, and a site of its own: "w.0". What is computed elementwise between two such
products is computed for each group, so that the GEMMs of a group are a chain. Graphs are changed as torch captured
them: sites are found, and forwards traced, in the same form.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from loka.graph.capture.captured import Captured, map_tree
from loka.graph.sites.flow import ACTIVATIONS
from loka.graph.sites.op_names import op_name, writes_in_place
from loka.graph.sites.products.matrix_product import LEAST, MOST
from loka.graph.sites.weights import swaps_columns

_ELEMENTWISE = ACTIVATIONS | {"add", "sub", "mul"}
_SWAPS = frozenset(("transpose", "swapaxes", "permute", "mT"))
_MATMULS = frozenset(("bmm", "matmul"))


def split_groups(captured: Captured, module: nn.Module, wanted: Callable[[str], bool] = lambda path: True) -> Captured:
    """The capture with a product for each group.

    `wanted` tells by their paths in the module which Parameters' products are split. Others are left, and so are
    matrices smaller than LEAST, more than MOST of them, and all products in a forward with a transform of torch.func,
    where a tensor stands for many. The graph is changed in place; new nodes have the line and the modules of those
    that they replace.
    """
    if any(_name(node).endswith("increment_nesting") for node in captured.graph.nodes):
        return captured
    splitting = _Splitting(captured, module, wanted)
    for node in list(captured.graph.nodes):
        product = splitting.product(node)
        if product is not None:
            splitting.replace(node, product)
    return splitting.finished()


def group_equation(equation: str, rank: int, weight_first: bool) -> tuple[int, str] | None:
    """An einsum of x, which has `rank` dimensions, and a Parameter of (groups, ., .), as that of one group.

    The dimension of the groups, which x and the result have in common, and the equation without their letter; None for
    an equation that is no product of each group with its matrix.

    >>> group_equation("bti,tio->bto", 3, False)
    (1, 'bi,io->bo')
    """
    text = equation.replace(" ", "")
    inputs, arrow, output = text.partition("->")
    if inputs.count(",") != 1:
        return None
    of_weight, of_x = inputs.split(",") if weight_first else reversed(inputs.split(","))
    letter = of_weight[:1]
    if not arrow or len(of_weight) != 3 or len(set(of_weight)) != 3:
        return None
    if [of_x.count(letter), output.count(letter)] != [1, 1]:
        return None
    if sorted((c in of_x, c in output) for c in of_weight[1:]) != [(False, True), (True, False)]:
        return None
    dim, there = (_place(letter, term, rank) for term in (of_x, output))
    return (dim, text.replace(letter, "")) if dim == there else None


def _place(letter: str, term: str, rank: int) -> int:
    """The dimension of a letter in a term of an einsum."""
    before, after = term.split(letter)
    return rank - 1 - len(after) if "..." in before else len(before)


@dataclass(frozen=True, slots=True)
class _Product:
    """A product of x with the matrices of a Parameter, of which x and the result have one for each index of `dim`."""

    x: fx.Node
    weight: fx.Node
    groups: int
    dim: int
    swapped: bool = False  # the product is with the transposed matrices
    shared: bool = False  # every group reads all of x, and the result alone has the dimension
    equation: str = ""  # of the einsum of one group; "" for a matrix product
    weight_first: bool = False  # in the equation


class _Splitting:
    """A capture whose products are being split."""

    def __init__(self, captured: Captured, module: nn.Module, wanted: Callable[[str], bool]) -> None:
        self._captured, self._graph = captured, captured.graph
        parameters = dict(module.named_parameters(remove_duplicate=False))
        paths = {node: source.path for node, source in captured.sources.items() if source.path in parameters}
        self._fixed = set(paths)  # nodes that are Parameters, or views of them
        self._wanted = {node for node, path in paths.items() if path is not None and wanted(path)}
        self._parts: dict[fx.Node, tuple[int, list[fx.Node]]] = {}  # of a stack: its dimension and what it stacks
        self._unbound: dict[tuple[fx.Node, int], list[fx.Node]] = {}  # the parts of a tensor along a dimension
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._superseded: set[fx.Node] = set()  # nodes that may have nothing left that reads them

    def product(self, node: fx.Node) -> _Product | None:
        """What a node multiplies, if that is to be split."""
        if not node.op.startswith("call") or "example_value" not in node.meta:
            return None
        if node.all_input_nodes and self._fixed.issuperset(node.all_input_nodes):
            self._fixed.add(node)
        name = _name(node)
        if name == "einsum":
            found = self._einsum(node)
        elif name in _MATMULS and len(node.args) == 2 and not node.kwargs:
            found = self._matmul(*node.args)
        else:
            return None
        sizes = () if found is None else tuple(found.weight.meta["example_value"].shape)
        fits = sizes and all(type(size) is int for size in sizes) and min(sizes[1:]) >= LEAST and 1 < sizes[0] <= MOST
        return found if fits else None

    def replace(self, node: fx.Node, product: _Product) -> None:
        """Put the products of the groups, stacked, in the place of a product."""
        add = _Inserter(self._graph, node)
        parts = [product.x] * product.groups if product.shared else self._parts_of(product.x, product, add)
        made = [self._one(product, part, group, add) for group, part in enumerate(parts)]
        stack = add.function(torch.stack, made, 0 if product.equation else product.dim)
        if product.equation and product.dim:  # as an einsum leaves its result in memory
            self._superseded.add(stack)
            stack = add.method("movedim", stack, 0, product.dim)
        self._parts[stack] = product.dim, made
        self._replaced[node] = stack
        node.replace_all_uses_with(stack)
        self._graph.erase_node(node)

    def finished(self) -> Captured:
        """The capture, without what nothing reads any more."""
        if not self._replaced:
            return self._captured
        for node in reversed(list(self._graph.nodes)):
            if not node.users and (node in self._parts or node in self._superseded):
                self._graph.erase_node(node)
        result = map_tree(
            self._captured.result, lambda leaf: self._replaced.get(leaf, leaf) if isinstance(leaf, fx.Node) else leaf
        )
        return replace(self._captured, result=result)

    def _matrices(self, node: Any) -> tuple[fx.Node, bool] | None:
        """The Parameter of three dimensions that a node is, or whose matrices it transposes: True for the latter."""
        if not isinstance(node, fx.Node):
            return None
        if node in self._wanted and node.meta["example_value"].dim() == 3:
            return node, False
        if _name(node) in _SWAPS and swaps_columns(_name(node), _after_tensor(node)):
            held = self._matrices(node.args[0])
            if held is not None:
                self._superseded.add(node)
                return held[0], not held[1]
        return None

    def _matmul(self, x: Any, second: Any) -> _Product | None:
        held = self._matrices(second)
        if held is None or not isinstance(x, fx.Node) or x in self._fixed:
            return None
        groups, shape = held[0].meta["example_value"].shape[0], x.meta["example_value"].shape
        if len(shape) == 2:
            return _Product(x, held[0], groups, 0, held[1], shared=True)
        if len(shape) < 3 or _number(shape[-3]) != groups:
            return None
        return _Product(x, held[0], groups, len(shape) - 3, held[1])

    def _einsum(self, node: fx.Node) -> _Product | None:
        args: tuple[Any, ...] = node.args
        equation, operands = args[0], list(args[1:])
        if len(operands) == 1 and isinstance(operands[0], tuple | list):
            operands = list(operands[0])
        held = [self._matrices(operand) for operand in operands]
        if len(held) != 2 or not isinstance(equation, str) or (held[0] is None) == (held[1] is None):
            return None
        first = held[0] is not None
        (weight, swapped), x = next(each for each in held if each is not None), operands[first]
        one = None if swapped or x in self._fixed else group_equation(equation, x.meta["example_value"].dim(), first)
        if one is None:
            return None
        groups = weight.meta["example_value"].shape[0]
        return _Product(x, weight, groups, one[0], equation=one[1], weight_first=first)

    def _one(self, product: _Product, x: fx.Node, group: int, add: _Inserter) -> fx.Node:
        """The product of one group."""
        matrix = add.function(operator.getitem, product.weight, group)
        if product.equation:
            operands = (matrix, x) if product.weight_first else (x, matrix)
            return add.function(torch.einsum, product.equation, *operands)
        return add.function(operator.matmul, x, add.method("t", matrix) if product.swapped else matrix)

    def _parts_of(self, x: fx.Node, product: _Product, add: _Inserter) -> Sequence[fx.Node]:
        """What x is for each group: computed from what products before made of it, or its parts."""
        if self._splits(x, product):
            return [self._of_group(x, group, product, add) for group in range(product.groups)]
        if (x, product.dim) not in self._unbound:
            unbound = add.function(torch.unbind, x, product.dim)
            parts = [add.function(operator.getitem, unbound, group) for group in range(product.groups)]
            self._unbound[x, product.dim] = parts
        return self._unbound[x, product.dim]

    def _splits(self, node: fx.Node, product: _Product) -> bool:
        """True for the stack of a product before, and for what is elementwise of such stacks and read by one alone."""
        if node in self._parts:
            # A write into the stack does not reach the parts: only what is computed on them alone may write.
            written = len(node.users) > 1 and any(map(_writes_in_place, node.users))
            return self._parts[node][0] == product.dim and not written
        value, rank = node.meta.get("example_value"), product.x.meta["example_value"].dim()
        if _name(node) not in _ELEMENTWISE or len(node.users) != 1 or "out" in node.kwargs:
            return False
        operands = [each for each in node.all_input_nodes if each not in self._fixed]
        same = isinstance(value, Tensor) and value.dim() == rank
        return same and bool(operands) and all(self._splits(each, product) for each in operands)

    def _of_group(self, node: fx.Node, group: int, product: _Product, add: _Inserter) -> fx.Node:
        """What `_splits`, or a Parameter beside it, for one group."""
        if node in self._parts:
            return self._parts[node][1][group]
        if node not in self._fixed:
            self._superseded.add(node)
            args, kwargs = (
                fx.node.map_arg(each, lambda operand: self._of_group(operand, group, product, add))
                for each in (node.args, node.kwargs)
            )
            return add.like(node, args, kwargs)
        shape = node.meta["example_value"].shape
        dim = product.dim - (product.x.meta["example_value"].dim() - len(shape))
        if dim < 0:
            return node  # it has no such dimension, and every group reads all of it
        index = group if shape[dim] == product.groups else 0
        return add.function(operator.getitem, node, (slice(None),) * dim + (index,) if dim else index)


class _Inserter:
    """Adds nodes before another, as if that line had made them, with the fake values that they have."""

    def __init__(self, graph: fx.Graph, before: fx.Node) -> None:
        self._graph, self._before = graph, before

    def function(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        return self._node("call_function", target, args, {}, self._before)

    def method(self, target: str, *args: Any) -> fx.Node:
        return self._node("call_method", target, args, {}, self._before)

    def like(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        """The same operation on other operands."""
        return self._node(node.op, node.target, args, kwargs, node)

    def _node(self, kind: str, target: Any, args: Any, kwargs: Any, origin: fx.Node) -> fx.Node:
        with self._graph.inserting_before(self._before):
            made = self._graph.create_node(kind, target, tuple(args), dict(kwargs))
        values = fx.node.map_arg((made.args, made.kwargs), lambda each: each.meta["example_value"])
        run = getattr(Tensor, target) if isinstance(target, str) else target
        made.meta = dict(origin.meta) | {"example_value": run(*values[0], **values[1])}
        return made


def _number(size: int | torch.SymInt) -> int | None:
    """A size that is a number, or a symbol that has to be one; no guard is installed."""
    return size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size


def _writes_in_place(node: fx.Node) -> bool:
    """True for `y.add_(x)`, `y += x` and `relu(y, inplace=True)`."""
    function = getattr(Tensor, str(node.target), None) if node.op == "call_method" else node.target
    return writes_in_place(function, node.kwargs) or True in (*node.args[1:], node.kwargs.get("inplace"))


def _after_tensor(node: fx.Node) -> tuple[Any, ...]:
    """The arguments after the tensor that a function, a method or an attribute is of."""
    return node.args[2:] if node.target is getattr else node.args[1:]


def _name(node: fx.Node) -> str:
    """The name of a torch function, method or attribute; "" for other nodes."""
    if node.target is getattr:
        return str(node.args[1])
    if node.op == "call_method":
        return op_name(getattr(Tensor, str(node.target), str))
    return op_name(node.target) if node.op == "call_function" and callable(node.target) else ""
