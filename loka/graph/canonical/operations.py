"""ATen operations as nodes of the canonical graph: views, sums, products and concatenations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from torch import Tensor

from loka.graph.canonical.layout import Size, is_fixed, regrouped, rows_of
from loka.graph.canonical.nodes import Concatenation, Graph, Node, Other, Value, is_weight
from loka.graph.canonical.products import Products, Unsupported, factor, multiplied, part_of
from loka.graph.canonical.recording import AtenCall
from loka.graph.canonical.sums import Sums
from loka.graph.ir import Statement

_RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten"})
_SAME = frozenset({"clone", "contiguous", "alias", "lift_fresh", "_to_copy", "positive"})
_MADE = frozenset({"zeros", "new_zeros", "ones", "new_ones", "empty", "new_empty"})
SIZED = _RESHAPES | _SAME | _MADE | {"expand", "repeat"}  # what sizes of the batch are nothing but sizes in


class Operations:
    """What operations make of the tensors so far: `values` and `shapes` are theirs, by id of a tensor.

    `site_of` gives the site of a weight.
    """

    def __init__(
        self,
        graph: Graph,
        products: Products,
        values: dict[int, Value],
        shapes: Mapping[int, tuple[Size, ...]],
        count: int,
        site_of: Callable[[Node, Statement], str | None],
    ) -> None:
        self._graph, self._products, self._count = graph, products, count
        self._site_of = site_of
        self._values, self._shapes = values, shapes
        self._sums = Sums(graph, count)

    def value(self, tensor: object) -> Value:
        """The value of a tensor. Raises Unsupported for what is none, or is not known."""
        if not isinstance(tensor, Tensor) or id(tensor) not in self._values:
            raise Unsupported
        return self._values[id(tensor)]

    def result(self, call: AtenCall, step: Statement, place: int) -> Value:
        """What an operation makes that returns one tensor. Raises Unsupported."""
        shape = self._shapes[id(call.result)]
        view = self._view(call, call.name, shape, place)
        if view is not None:
            return view
        handler = _HANDLERS.get(call.name)
        found = None if handler is None else handler(self, call, shape, step, place)
        return found or self.other(call.result, place)

    def other(self, tensor: Tensor, place: int) -> Value:
        """A tensor that is computed as it was traced."""
        shape = self._shapes[id(tensor)]
        return Value(Other(shape=shape, place=place), rows_of(shape), shape)

    def _view(self, call: AtenCall, name: str, shape: tuple[Size, ...], place: int) -> Value | None:
        """The result of a view, or of a copy of the same values; None for other operations."""
        order = _order(call, name)
        if order is not None:
            value = self.value(call.args[0])
            return Value(value.node, tuple(value.dims[each] for each in order), shape)
        if name in _SAME:
            value = self.value(call.args[0])
            changed = call.result.dtype != call.args[0].dtype
            return None if changed else Value(value.node, value.dims, shape)
        if name == "squeeze" and not self._squeezes_fixed(call):
            raise Unsupported  # which dimensions it drops may differ in another call
        if name in _RESHAPES:
            return reshaped(self.value(call.args[0]), shape)
        if name == "expand":
            value = self.value(call.args[0])
            return Value(value.node, ((),) * (len(shape) - len(value.dims)) + value.dims, shape)
        if name == "repeat":
            return self._repeated(call, shape)
        if name in ("select", "slice"):
            return self._slice(call, name, place)
        if name in ("sum", "mean") and isinstance(call.args[0], Tensor):
            return self._summed(call, shape, place)
        return None

    def _squeezes_fixed(self, call: AtenCall) -> bool:
        """True for `squeeze` of named dimensions whose sizes are the same in all calls."""
        shape = self.value(call.args[0]).shape
        given = call.args[1] if len(call.args) > 1 else None
        return given is not None and all(is_fixed(shape[dim]) for dim in ([given] if isinstance(given, int) else given))

    def _repeated(self, call: AtenCall, shape: tuple[Size, ...]) -> Value:
        """A repetition along dimensions of one element alone, which are broadcast then."""
        value = self.value(call.args[0])
        lead = len(shape) - len(value.dims)
        if any(dim and times != 1 for dim, times in zip(value.dims, call.args[1][lead:], strict=True)):
            raise Unsupported
        return Value(value.node, ((),) * lead + value.dims, shape)

    def _slice(self, call: AtenCall, name: str, place: int) -> Value:
        value = self.value(call.args[0])
        dim = (call.args[1] if len(call.args) > 1 else 0) % max(len(value.shape), 1)
        size = value.shape[dim]
        if not is_fixed(size):
            if name == "select" or not _takes_all(call):
                raise Unsupported
            return value
        if name == "select":
            return part_of(value, dim, int(call.args[2]) % size[0], 1, True, self._graph, place)
        start = call.args[2] if len(call.args) > 2 else None
        if len(call.args) > 4 and call.args[4] != 1:
            raise Unsupported
        first = 0 if start is None else min(max(start + size[0] if start < 0 else start, 0), size[0])
        length = self._shapes[id(call.result)][dim]
        if len(set(length)) > 1:
            raise Unsupported
        return part_of(value, dim, first, length[0], False, self._graph, place)

    def parts(self, call: AtenCall, place: int) -> list[tuple[Value | None, Tensor]] | None:
        """The parts of a tensor, for operations that return several; None for others."""
        if call.name not in ("split", "split_with_sizes", "chunk", "unbind", "unsafe_split", "unsafe_chunk"):
            return None
        value = self.value(call.args[0])
        named = call.kwargs.get("dim", 0)
        dim = (call.args[-1] if len(call.args) > (1 if call.name == "unbind" else 2) else named) % len(value.shape)
        if len(set(value.shape[dim])) > 1:
            raise Unsupported
        made: list[tuple[Value | None, Tensor]] = []
        start = 0
        for tensor in call.made:
            if call.name == "unbind":
                made.append((part_of(value, dim, start, 1, True, self._graph, place), tensor))
                start += 1
            else:
                length = tensor.shape[dim]
                made.append((part_of(value, dim, start, length, False, self._graph, place), tensor))
                start += length
        return made

    def _summed(self, call: AtenCall, shape: tuple[Size, ...], place: int) -> Value | None:
        """A sum over dimensions of one element, which is a view, or of a product of two tensors; None for others."""
        value = self._values.get(id(call.args[0]))
        if value is None:
            return None
        given = call.args[1] if len(call.args) > 1 else None
        dims = [
            each % len(value.shape)
            for each in ([given] if isinstance(given, int) else given or range(len(value.shape)))
        ]
        if all(value.shape[each] == (1,) * self._count for each in dims):
            return reshaped(value, shape)
        factors = multiplied(value) if call.name == "sum" else None
        if factors is None:
            return None
        a, b, sizes = factors
        labels = [label for place_, label in enumerate(sizes) if place_ not in dims]
        product = self._products.contraction(a, b, labels, sizes, None, place)
        return product if len(product.shape) == len(shape) else reshaped(product, shape)

    def scaled(self, call: AtenCall, name: str) -> bool:
        """True if a factor of an operation is not one."""
        return bool(call.given.get(name, 1) != 1)

    def add(self, call: AtenCall, shape: tuple[Size, ...], step: Statement, place: int) -> Value | None:
        """aten::add."""
        a, b = call.args[:2]
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            return self.value(a) if b == 0 and isinstance(a, Tensor) else None
        return None if self.scaled(call, "alpha") else self._pair_of("add", a, b, shape, place)

    def mul(self, call: AtenCall, shape: tuple[Size, ...], step: Statement, place: int) -> Value | None:
        """aten::mul."""
        a, b = call.args[:2]
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            return self.value(a) if b == 1 and isinstance(a, Tensor) else None
        return self._pair_of("mul", a, b, shape, place)

    def _pair_of(self, op: str, a: Tensor, b: Tensor, shape: tuple[Size, ...], place: int) -> Value | None:
        if id(a) not in self._values or id(b) not in self._values:
            return None
        try:
            return self._sums.pair(op, self.value(a), self.value(b), shape, place)
        except Unsupported:
            return None

    def addcmul(self, call: AtenCall, shape: tuple[Size, ...], step: Statement, place: int) -> Value | None:
        """aten::addcmul, a product and a sum."""
        c, a, b = map(self.value, call.args[:3])
        if self.scaled(call, "value"):
            return None
        return self._sums.pair("add", self._sums.pair("mul", a, b, shape, place), c, shape, place)

    def mm(self, call: AtenCall, shape: tuple[Size, ...], step: Statement, place: int) -> Value:
        """aten::mm."""
        return self.product(call.args[0], call.args[1], "mk", "kn", "mn", step, place)

    def bmm(self, call: AtenCall, shape: tuple[Size, ...], step: Statement, place: int) -> Value:
        """aten::bmm."""
        return self.product(call.args[0], call.args[1], "tmk", "tkn", "tmn", step, place)

    def addmm(self, call: AtenCall, shape: tuple[Size, ...], step: Statement, place: int) -> Value:
        """aten::addmm and aten::baddbmm."""
        if self.scaled(call, "alpha") or self.scaled(call, "beta"):
            raise Unsupported
        a, b, c = ("tmk", "tkn", "tmn") if call.name == "baddbmm" else ("mk", "kn", "mn")
        product = self.product(call.args[1], call.args[2], a, b, c, step, place)
        added = self.value(call.args[0])
        return self._sums.pair("add", product, added, shape, place, cast=1)

    def product(self, a: Tensor, b: Tensor, left: str, right: str, out: str, step: Statement, place: int) -> Value:
        """A product of two tensors whose dimensions have these letters."""
        x, y = self.value(a), self.value(b)
        sizes = {**dict(zip(left, x.shape, strict=True)), **dict(zip(right, y.shape, strict=True))}
        site = self._site_of(y.node if is_weight(y.node) else x.node, step)
        return self._products.contraction(factor(x, left), factor(y, right), out, sizes, site, place)

    def convolution(self, call: AtenCall, shape: tuple[Size, ...], step: Statement, place: int) -> Value | None:
        """aten::convolution of one dimension and kernel size 1, a product of each sample."""
        x, weight, bias = call.args[:3]
        plain = len(weight.shape) == 3 and weight.shape[2] == 1 and (call.args[6], call.args[8]) == (False, 1)
        if not plain or [list(each) for each in call.args[3:6]] != [[1], [0], [1]]:
            return None
        value = self.value(weight)
        matrix = reshaped(value, value.shape[:2])
        x_value = self.value(x)
        sizes = dict(zip("tkl", x_value.shape, strict=True)) | {"n": value.shape[0]}
        site = self._site_of(value.node, step)
        made = self._products.contraction(factor(x_value, "tkl"), factor(matrix, "nk"), "tnl", sizes, site, place)
        if bias is None:
            return made
        added = self.value(bias)
        column = Value(added.node, ((), *added.dims, ()), ((1,) * self._count, *added.shape, (1,) * self._count))
        return self._sums.pair("add", made, column, shape, place)

    def cat(self, call: AtenCall, shape: tuple[Size, ...], step: Statement, place: int) -> Value | None:
        """aten::cat and aten::stack."""
        dim = (call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)) % len(shape)
        values = [self.value(each) for each in call.args[0]]
        if call.name == "stack":
            lifted = [(*e.dims[:dim], (), *e.dims[dim:]) for e in values]
            sizes = [(*e.shape[:dim], (1,) * self._count, *e.shape[dim:]) for e in values]
            values = [Value(e.node, d, s) for e, d, s in zip(values, lifted, sizes, strict=True)]
        if len(values) == 1:
            return values[0]
        node = self._graph.one(Concatenation(shape=shape, place=place, parts=tuple(values), dim=dim))
        return Value(node, rows_of(shape), shape)


_Handler = Callable[[Operations, AtenCall, tuple[Size, ...], Statement, int], "Value | None"]
_HANDLERS: Mapping[str, _Handler] = {
    "add": Operations.add,
    "mul": Operations.mul,
    "multiply": Operations.mul,
    "addcmul": Operations.addcmul,
    "mm": Operations.mm,
    "bmm": Operations.bmm,
    "addmm": Operations.addmm,
    "baddbmm": Operations.addmm,
    "convolution": Operations.convolution,
    "cat": Operations.cat,
    "stack": Operations.cat,
}


def _takes_all(call: AtenCall) -> bool:
    """True for a slice of a dimension as long as it may be."""
    given = call.given
    ends = given.get("start") in (None, 0) and given.get("end") in (None, sys.maxsize)
    return ends and given.get("step", 1) == 1


def _order(call: AtenCall, name: str) -> tuple[int, ...] | None:
    """The order of the dimensions that a permutation takes; None for other operations."""
    if name not in ("transpose", "t", "permute", "swapaxes", "movedim", "numpy_T", "mT"):
        return None
    order = list(range(call.args[0].dim()))
    if name == "permute":
        return tuple(each % len(order) for each in call.args[1])
    if name in ("t", "numpy_T", "mT"):
        return tuple(reversed(order)) if len(order) < 3 else (*order[:-2], order[-1], order[-2])
    if name == "movedim":
        return None
    a, b = (each % len(order) for each in call.args[1:3])
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def reshaped(value: Value, shape: tuple[Size, ...]) -> Value:
    """A tensor in another shape. Raises Unsupported where its dimensions cannot be cut in this way."""
    ones = (1,) * len((*shape, *value.shape, (1, 1))[0])
    given = [(dim, size) for dim, size in zip(value.dims, value.shape, strict=True) if size != ones]
    if [size for _, size in given] == [size for size in shape if size != ones]:
        dims = iter(dim for dim, _ in given)
        return Value(value.node, tuple(() if size == ones else next(dims) for size in shape), shape)
    if any(not dim for dim, _ in given):
        raise Unsupported
    found = regrouped([piece for dim, _ in given for piece in dim], shape)
    if found is None:
        raise Unsupported
    return Value(value.node, found, shape)
