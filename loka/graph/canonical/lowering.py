"""From ATen operations to the canonical graph, statement by statement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loka.graph.canonical.concatenations import concatenated
from loka.graph.canonical.functions import Known, Pieces, known_function
from loka.graph.canonical.layout import Dims, Piece, Size, Step, merged, regrouped, rows_of, size_of, steps_along
from loka.graph.canonical.nodes import (
    Activation,
    Graph,
    Linear,
    Node,
    Norm,
    Operand,
    Other,
    Pair,
    Parameter,
    Part,
    Source,
    Value,
    is_weight,
)
from loka.graph.canonical.products import (
    Products,
    Unsupported,
    columns_of,
    factor,
    multiplied,
    operand_value,
    part_of,
)
from loka.graph.canonical.recording import AtenCall, Run, tensors_in
from loka.graph.ir import RefKind, Statement
from loka.graph.patterns.fm_interaction import GUARDS

_RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "flatten"})
_SAME = frozenset({"clone", "contiguous", "alias", "lift_fresh", "_to_copy", "positive"})


@dataclass(slots=True)
class Lowered:
    """The graph of a forward. Places are those of its statements."""

    arguments: dict[str, Value]  # those of the forward that are tensors
    read: list[dict[str, Value]]  # by place, the tensors that the statement reads, by name
    made: list[Value | None]  # by place, the tensor that it makes; None for something else
    opaque: set[int] = field(default_factory=set)  # statements that are taken as they are
    effects: set[int] = field(default_factory=set)  # of these, the ones with effects, which keep their order
    changed: set[str] = field(default_factory=set)  # locals that a later statement changes in place
    changes: dict[int, Node] = field(default_factory=dict)  # by place, what a statement changes in place
    fixed: dict[str, object] = field(default_factory=dict)  # locals that are no tensors, with their values in each run
    contiguous: set[int] = field(default_factory=set)  # statements that make a contiguous tensor
    holders: dict[Node, list[int]] = field(default_factory=dict)  # places of statements that make a tensor of a node


def lowered(
    statements: Sequence[Statement], runs: Sequence[Run], names: Mapping[str, str], barred: frozenset[str], split: bool
) -> Lowered:
    """The graph of a forward from its runs.

    `names` are the expressions of Parameters and buffers by name, `barred` the targets of statements that are taken as
    they are. `split`: parts of products with weights are products with parts of these.
    """
    return _Lowering(statements, runs, names, barred, split).all()


class _Lowering:
    def __init__(
        self,
        statements: Sequence[Statement],
        runs: Sequence[Run],
        names: Mapping[str, str],
        barred: frozenset[str],
        split: bool,
    ) -> None:
        self._statements, self._runs, self._barred, self._split = statements, runs, barred, split
        self._graph, self._count = Graph(), len(runs)
        self._products = Products(self._graph, self._count, self._read_once)
        self._values: dict[int, Value] = {}  # by the id of a tensor of the first run
        self._shapes: dict[int, tuple[Size, ...]] = {}
        self._locals: dict[str, object] = {}
        self._calls: dict[int, AtenCall] = {}  # by the id of the tensor that a call made
        self._alive: list[object] = []
        self._found = Lowered({}, [], [])
        for name, tensor in runs[0].tensors.items():
            shape = self._noted(tensor, [run.tensors[name] for run in runs])
            if name in names:
                node = self._graph.one((name,), Parameter(shape=shape, place=-1, name=names[name]))
                self._values.setdefault(id(tensor), Value(node, rows_of(shape), shape))
        for name in runs[0].arguments:
            given = [run.arguments.get(name) for run in runs]
            self._take(given, -1)
            self._locals[name] = given[0]
            if isinstance(given[0], Tensor):
                self._found.arguments[name] = self._values[id(given[0])]

        self._readers: dict[str, set[int]] = {}
        for place, step in enumerate(statements):
            for ref in step.operands:
                self._readers.setdefault(ref.text, set()).add(place)

    def _read_once(self, node: Node) -> bool:
        places = self._found.holders.get(node, [])
        read = (self._readers.get(self._statements[place].target, set()) for place in places)
        return len(set().union(*read) - set(places)) <= 1

    def all(self) -> Lowered:
        """The graph of all statements."""
        calls: dict[int, list[tuple[AtenCall, ...]]] = {}
        for each in zip(*(run.calls for run in self._runs), strict=True):
            calls.setdefault(each[0].place, []).append(each)
        for place, step in enumerate(self._statements):
            self._found.read.append(
                {
                    ref.text: self._values[id(self._locals[ref.text])]
                    for ref in step.operands
                    if ref.kind is RefKind.LOCAL
                    and isinstance(self._locals.get(ref.text), Tensor)
                    and id(self._locals[ref.text]) in self._values
                }
            )
            self._statement(place, step, calls.get(place, []))
        return self._found

    def _statement(self, place: int, step: Statement, calls: Sequence[tuple[AtenCall, ...]]) -> None:
        made = [run.made.get(place) for run in self._runs]
        if self._has_effects(step, calls) or step.target in self._barred:
            self._take_as_is(place, made, calls, step)
        else:
            before = dict(self._values)
            try:
                for each in calls:
                    self._call(each, step, place)
            except Unsupported:
                self._values = before
                self._take_as_is(place, made, calls, step, pure=True)
        result = made[0]
        for change in (each for each in self._runs[0].changes if each.place == place):
            if id(change.old) in self._values:
                self._found.changes[place] = self._values[id(change.old)].node
            for name, held in self._locals.items():
                if held is change.old:
                    self._locals[name] = change.new
                    self._found.changed.update((name, step.target))
        self._locals[step.target] = result
        self._alive += made
        value = self._values.get(id(result)) if isinstance(result, Tensor) else None
        if isinstance(result, Tensor) and value is None:
            self._take(made, place)
            self._found.opaque.add(place)
            value = self._values[id(result)]
        if value is not None and place not in self._found.opaque:
            value = self._recognised(result, value, place)
        self._found.made.append(value)
        if isinstance(result, Tensor) and result.layout == torch.strided and result.is_contiguous():
            self._found.contiguous.add(place)
        if value is not None:
            self._found.holders.setdefault(value.node, []).append(place)
        elif step.target != "_":
            self._found.fixed[step.target] = made

    def _has_effects(self, step: Statement, calls: Sequence[tuple[AtenCall, ...]]) -> bool:
        if step.op == "module" or (step.target == "_" and (not calls or step.op in GUARDS)):
            return True
        return any(torch.Tag.nondeterministic_seeded in each[0].function.tags for each in calls)

    def _take_as_is(
        self,
        place: int,
        made: Sequence[object],
        calls: Sequence[tuple[AtenCall, ...]],
        step: Statement,
        pure: bool = False,
    ) -> None:
        """Takes what a statement makes as tensors of their own."""
        self._found.opaque.add(place)
        if not pure and step.target not in self._barred:
            self._found.effects.add(place)
        self._take(made, place)

    def _take(self, values: Sequence[object], place: int) -> None:
        """Each tensor in a value that is not known as a source."""
        for tensors in zip(*map(tensors_in, values), strict=False):
            if id(tensors[0]) not in self._values:
                shape = self._noted(tensors[0], tensors)
                node = Source(shape=shape, place=place)
                self._values[id(tensors[0])] = Value(node, rows_of(shape), shape)

    def _noted(self, tensor: Tensor, tensors: Sequence[Tensor]) -> tuple[Size, ...]:
        shape = tuple(zip(*(each.shape for each in tensors), strict=True))
        self._shapes[id(tensor)] = shape
        return shape

    def _value(self, tensor: object) -> Value:
        if not isinstance(tensor, Tensor) or id(tensor) not in self._values:
            raise Unsupported
        return self._values[id(tensor)]

    def _call(self, calls: tuple[AtenCall, ...], step: Statement, place: int) -> None:
        """Notes what one operation makes."""
        call = calls[0]
        for tensors in zip(*(each.made for each in calls), strict=True):
            self._alive += tensors
            self._noted(tensors[0], tensors)
        if isinstance(call.result, Tensor):
            self._calls[id(call.result)] = call
            self._values[id(call.result)] = self._result(call, call.name, step, place)
            return
        for value, tensor in self._parts(call, place) or ((None, tensor) for tensor in call.made):
            self._calls[id(tensor)] = call
            self._values[id(tensor)] = value or self._other(tensor, place)

    def _result(self, call: AtenCall, name: str, step: Statement, place: int) -> Value:
        shape = self._shapes[id(call.result)]
        view = self._view(call, name, shape, place)
        if view is not None:
            return view
        handler = _HANDLERS.get(name)
        found = None if handler is None else handler(self, call, shape, step, place)
        return found or self._other(call.result, place)

    def _other(self, tensor: Tensor, place: int) -> Value:
        shape = self._shapes[id(tensor)]
        return Value(Other(shape=shape, place=place), rows_of(shape), shape)

    # Views

    def _view(self, call: AtenCall, name: str, shape: tuple[Size, ...], place: int) -> Value | None:
        """The result of a view, or of a copy of the same values; None for other operations."""
        order = _order(call, name)
        if order is not None:
            value = self._value(call.args[0])
            return Value(value.node, tuple(value.dims[each] for each in order), shape)
        if name in _SAME:
            value = self._value(call.args[0])
            changed = call.result.dtype != call.args[0].dtype
            return None if changed else Value(value.node, value.dims, shape)
        if name in _RESHAPES:
            return _reshaped(self._value(call.args[0]), shape)
        if name == "expand":
            value = self._value(call.args[0])
            return Value(value.node, ((),) * (len(shape) - len(value.dims)) + value.dims, shape)
        if name in ("select", "slice"):
            return self._slice(call, name, place)
        if name in ("sum", "mean") and isinstance(call.args[0], Tensor):
            return self._summed(call, shape, place)
        return None

    def _slice(self, call: AtenCall, name: str, place: int) -> Value:
        value = self._value(call.args[0])
        dim = (call.args[1] if len(call.args) > 1 else 0) % max(len(value.shape), 1)
        size = value.shape[dim]
        if len(set(size)) > 1:
            whole = name == "slice" and call.result.shape == call.args[0].shape
            if not whole:
                raise Unsupported
            return value
        if name == "select":
            return part_of(value, dim, int(call.args[2]) % size[0], 1, True, self._graph, place)
        start, _, step = (*call.args[2:], *(None, None, 1)[len(call.args) - 2 :])
        if step != 1:
            raise Unsupported
        first = 0 if start is None else min(max(start + size[0] if start < 0 else start, 0), size[0])
        return self._columns(value, dim, first, call.result.shape[dim], place)

    def _columns(self, value: Value, dim: int, start: int, length: int, place: int) -> Value:
        found = columns_of(value, dim, start, length, self._products) if self._split else None
        return found or part_of(value, dim, start, length, False, self._graph, place)

    def _parts(self, call: AtenCall, place: int) -> list[tuple[Value | None, Tensor]] | None:
        """The parts of a tensor, for operations that return several; None for others."""
        if call.name not in ("split", "split_with_sizes", "chunk", "unbind", "unsafe_split", "unsafe_chunk"):
            return None
        value = self._value(call.args[0])
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
                made.append((self._columns(value, dim, start, length, place), tensor))
                start += length
        return made

    def _summed(self, call: AtenCall, shape: tuple[Size, ...], place: int) -> Value | None:
        """A sum over dimensions of one element, which is a view, or of a product of two tensors; None for others."""
        value = self._values.get(id(call.args[0]))
        if value is None:
            return None
        given = call.args[1] if len(call.args) > 1 else None
        dims = [each % len(value.shape) for each in ([given] if isinstance(given, int) else given or range(len(value.shape)))]
        if all(value.shape[each] == (1,) * self._count for each in dims):
            return _reshaped(value, shape)
        factors = multiplied(value, dims) if call.name == "sum" else None
        if factors is None:
            return None
        a, b, sizes = factors
        labels = [label for place_, label in enumerate(sizes) if place_ not in dims]
        product = self._products.contraction(a, b, labels, sizes, None, place)
        return product if len(product.shape) == len(shape) else _reshaped(product, shape)

    # Sums and products

    def pair(self, op: str, a: Value, b: Value, shape: tuple[Size, ...], place: int) -> Value:
        """A sum or a product of two tensors that are broadcast to a shape."""
        full = [each for each in (a, b) if _is_full(each, shape) and not is_weight(each.node)]
        anchor = min(full, key=_rank, default=None)
        dims, node = (anchor.dims, anchor.node) if anchor is not None else (rows_of(shape), None)
        operands: list[Operand] = []
        for each in (a, b):
            if node is not None and each.node is node and each.dims == dims:
                operands.append(Operand(node, _identity(node, self._count)))
                continue
            steps = steps_along(dims, each.dims, shape)
            if steps is None:
                raise Unsupported
            operands.append(Operand(each.node, steps))
        frame = shape if node is None else node.shape
        made = Pair(shape=frame, place=place, op=op, operands=(operands[0], operands[1]))
        key = (op, frozenset((each.node, each.steps) for each in operands), node)
        found = Value(self._graph.one(key, made), dims, shape)
        return (self._biased(found, a, b) or self._factored(found, shape, place) or found) if op == "add" else found

    def _biased(self, found: Value, a: Value, b: Value) -> Value | None:
        """A product with a weight and a bias of its columns, as one linear; None for other sums."""
        for product, bias in ((a, b), (b, a)):
            node = product.node
            if not isinstance(node, Linear) or node.bias is not None or not is_weight(bias.node):
                continue
            pair = found.node
            steps = next((e.steps for e in pair.operands if e.node is bias.node), ()) if isinstance(pair, Pair) else ()
            real = [step for step in steps if any(step.other)]
            n = node.shape[-1]
            inside = size_of(tuple(Piece(step.size, step.stride) for step in real), self._count) == n
            if not inside or not all(all(e <= m for e, m in zip(step.end, n, strict=True)) for step in real):
                continue
            vector = Value(bias.node, (merged(Piece(step.size, step.other) for step in real),), (n,))
            made = Linear(
                shape=node.shape, place=node.place, x=node.x, rows=node.rows, k=node.k, weight=node.weight,
                weight_n=node.weight_n, weight_k=node.weight_k, site=node.site, bias=vector, unbiased=node, kind=node.kind,
            )  # fmt: skip
            key = (node, vector.node, vector.dims)
            return Value(self._graph.one(key, made), found.dims, found.shape)
        return None

    def _factored(self, found: Value, shape: tuple[Size, ...], place: int) -> Value | None:
        """x0 * u + x0 * bias, perhaps with a further term, as x0 * (u + bias) for a product u; None for others."""
        pair = found.node
        if not isinstance(pair, Pair):
            return None
        terms = [operand_value(each, found) for each in pair.operands]
        if None in terms:
            return None
        for first, second in (terms, terms[::-1]):
            if first is None or second is None or not isinstance(second.node, Pair):
                continue
            whole = self._common_factor(first, second, shape, place)
            if whole is not None:
                return whole
            inner = first.node
            if not isinstance(inner, Pair) or inner.op != "add":
                continue
            parts = [operand_value(each, first) for each in inner.operands]
            for rest, term in (parts, parts[::-1]):
                whole = None if term is None else self._common_factor(term, second, shape, place)
                if whole is not None and rest is not None:
                    return self.pair("add", rest, whole, shape, place)
        return None

    def _common_factor(self, a: Value, b: Value, shape: tuple[Size, ...], place: int) -> Value | None:
        if not all(isinstance(each.node, Pair) and each.node.op == "mul" for each in (a, b)):
            return None
        factors = []
        for each in (a, b):
            operands = each.node.operands if isinstance(each.node, Pair) else ()
            factors.append([operand_value(operand, each) for operand in operands])
        for x, u in (factors[0], factors[0][::-1]):
            for y, bias in (factors[1], factors[1][::-1]):
                if x is None or y is None or u is None or bias is None or (x.node, x.dims) != (y.node, y.dims):
                    continue
                if isinstance(u.node, Linear) and u.node.bias is None and is_weight(bias.node):
                    total = self.pair("add", u, bias, shape, place)
                    if isinstance(total.node, Linear):
                        return self.pair("mul", x, total, shape, place)
        return None

    # Functions

    def _recognised(self, tensor: object, value: Value, place: int) -> Value:
        """The value of a statement's result, as a norm or an activation where it is one."""
        if not isinstance(tensor, Tensor) or not isinstance(value.node, Other | Pair):
            return value
        pieces = Pieces(self._calls, self._values, self._shapes)
        found = known_function(tensor, pieces)
        if found is None:
            return value
        node = self._function(found, place)
        made = Value(node, found.x.dims, value.shape)
        self._values[id(tensor)] = made
        return made

    def _function(self, found: Known, place: int) -> Node:
        x = found.x
        if found.over:
            over = tuple(piece for dim in found.over for piece in x.dims[dim])
            affine = (found.weight, found.bias)
            keys = tuple(None if each is None else (each.node, each.dims) for each in affine)
            made: Node = Norm(
                shape=x.node.shape, place=place, kind=found.name, x=x.node, over=over, eps=found.eps,
                weight=found.weight, bias=found.bias,
            )  # fmt: skip
            return self._graph.one((found.name, x.node, over, found.eps, *keys), made)
        made = Activation(shape=x.node.shape, place=place, name=found.name, x=x.node)
        return self._graph.one((found.name, x.node), made)

    # What operations do

    def scaled(self, call: AtenCall, name: str) -> bool:
        """True if a factor of an operation is not one."""
        names = [argument.name for argument in call.function._schema.arguments]
        given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        return given.get(name, 1) != 1

    def add(self, call: AtenCall, shape: tuple[Size, ...], step: Statement, place: int) -> Value | None:
        """aten::add."""
        a, b = call.args[:2]
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            return self._value(a) if b == 0 and isinstance(a, Tensor) else None
        return None if self.scaled(call, "alpha") else self._pair_of("add", a, b, shape, place)

    def mul(self, call: AtenCall, shape: tuple[Size, ...], step: Statement, place: int) -> Value | None:
        """aten::mul."""
        a, b = call.args[:2]
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            return self._value(a) if b == 1 and isinstance(a, Tensor) else None
        return self._pair_of("mul", a, b, shape, place)

    def _pair_of(self, op: str, a: Tensor, b: Tensor, shape: tuple[Size, ...], place: int) -> Value | None:
        if id(a) not in self._values or id(b) not in self._values:
            return None
        try:
            return self.pair(op, self._value(a), self._value(b), shape, place)
        except Unsupported:
            return None

    def addcmul(self, call: AtenCall, shape: tuple[Size, ...], step: Statement, place: int) -> Value | None:
        """aten::addcmul, a product and a sum."""
        c, a, b = map(self._value, call.args[:3])
        if self.scaled(call, "value"):
            return None
        return self.pair("add", self.pair("mul", a, b, shape, place), c, shape, place)

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
        return self.pair("add", product, self._value(call.args[0]), shape, place)

    def product(self, a: Tensor, b: Tensor, left: str, right: str, out: str, step: Statement, place: int) -> Value:
        """A product of two tensors whose dimensions have these letters."""
        x, y = self._value(a), self._value(b)
        sizes = {**dict(zip(left, x.shape, strict=True)), **dict(zip(right, y.shape, strict=True))}
        site = None if step.call is None else step.call.site
        return self._products.contraction(factor(x, left), factor(y, right), out, sizes, site, place)

    def convolution(self, call: AtenCall, shape: tuple[Size, ...], step: Statement, place: int) -> Value | None:
        """aten::convolution of one dimension and kernel size 1, a product of each sample."""
        x, weight, bias = call.args[:3]
        plain = len(weight.shape) == 3 and weight.shape[2] == 1 and (call.args[6], call.args[8]) == (False, 1)
        if not plain or [list(each) for each in call.args[3:6]] != [[1], [0], [1]]:
            return None
        value = self._value(weight)
        matrix = _reshaped(value, value.shape[:2])
        x_value = self._value(x)
        sizes = dict(zip("tkl", x_value.shape, strict=True)) | {"n": value.shape[0]}
        site = None if step.call is None else step.call.site
        made = self._products.contraction(factor(x_value, "tkl"), factor(matrix, "nk"), "tnl", sizes, site, place)
        if bias is None:
            return made
        added = self._value(bias)
        column = Value(added.node, ((), *added.dims, ()), ((1,) * self._count, *added.shape, (1,) * self._count))
        return self.pair("add", made, column, shape, place)

    def cat(self, call: AtenCall, shape: tuple[Size, ...], step: Statement, place: int) -> Value | None:
        """aten::cat and aten::stack."""
        dim = (call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)) % len(shape)
        values = [self._value(each) for each in call.args[0]]
        if call.name == "stack":
            lifted = [(*e.dims[:dim], (), *e.dims[dim:]) for e in values]
            sizes = [(*e.shape[:dim], (1,) * self._count, *e.shape[dim:]) for e in values]
            values = [Value(e.node, d, s) for e, d, s in zip(values, lifted, sizes, strict=True)]
        return concatenated(values, dim, shape, place, self._graph, self.pair)


_Handler = Callable[[_Lowering, AtenCall, tuple[Size, ...], Statement, int], "Value | None"]
_HANDLERS: Mapping[str, _Handler] = {
    "add": _Lowering.add,
    "mul": _Lowering.mul,
    "multiply": _Lowering.mul,
    "addcmul": _Lowering.addcmul,
    "mm": _Lowering.mm,
    "bmm": _Lowering.bmm,
    "addmm": _Lowering.addmm,
    "baddbmm": _Lowering.addmm,
    "convolution": _Lowering.convolution,
    "cat": _Lowering.cat,
    "stack": _Lowering.cat,
}


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


def _reshaped(value: Value, shape: tuple[Size, ...]) -> Value:
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


def _is_full(value: Value, shape: tuple[Size, ...]) -> bool:
    same = value.shape == shape
    return same and all(size_of(dim, len(size)) == size for dim, size in zip(value.dims, shape, strict=True))


def _rank(value: Value) -> int:
    """Whose layout a sum or product of two tensors keeps: that of a product with a weight before all others."""
    node = value.node
    while isinstance(node, Pair | Activation | Norm):
        if isinstance(node, Pair):
            inner = [each.node for each in node.operands if not is_weight(each.node)]
            return min((_rank(Value(each, (), ())) for each in inner), default=2)
        node = node.x
    return 0 if isinstance(node, Linear) else 2 if isinstance(node, Source | Part | Parameter) else 1


def _identity(node: Node, runs: int) -> tuple[Step, ...]:
    """A node along its own elements."""
    shape: Dims = rows_of(node.shape)
    found = steps_along(shape, shape, node.shape)
    return found or ()
