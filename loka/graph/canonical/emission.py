"""From the canonical graph back to statements: each node as torch's own statement of it, in one order.

What a node reads is made just before it, so that the operations that one kernel takes stand together. A statement that
is canonical as it was traced stays, and so does everything that has no canonical form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from loka.graph.canonical.layout import (
    Piece,
    is_fixed,
    is_within,
    merged,
    over,
    regrouped,
    rows_of,
    size_of,
    steps_along,
    total,
    translated,
)
from loka.graph.canonical.locals import Emitted, Locals, paired
from loka.graph.canonical.lowering import Lowered, shared_products
from loka.graph.canonical.nodes import (
    Activation,
    Concatenation,
    Linear,
    Node,
    Norm,
    Pair,
    Product,
    Source,
    Value,
    is_weight,
)
from loka.graph.canonical.site_calls import product_layout
from loka.graph.canonical.views import CannotEmitError, weight_ref
from loka.graph.expression import Arg, Call, Ref, RefKind, function, local, locals_in, method
from loka.graph.ir import WEIGHTED, SiteCall, Statement

_OF_TORCH = frozenset({"sigmoid", "tanh"})  # those of torch.nn.functional are deprecated


def emitted(
    statements: Sequence[Statement],
    result: Arg,
    arguments: Sequence[str],
    graph: Lowered,
    result_values: Mapping[str, Value],
) -> Emitted:
    """The canonical statements of a forward. Raises CannotEmitError.

    `arguments` are the names of its arguments, `result` is what it returns, and `result_values` the tensors of the
    locals in that.
    """
    return _Emission(statements, arguments, graph).all(result, result_values)


class _Emission(Locals):
    def all(self, result: Arg, values: Mapping[str, Value]) -> Emitted:
        """All statements that the result and the effects need."""
        roots = sorted(self._graph.effects)
        self._shared = shared_products(self._graph, roots, [value.node for value in values.values()])
        self._returned = {value: name for name, value in values.items()}
        for place in roots:
            self._as_traced(place)
        for name in locals_in(result):
            if name in values:
                self._result(name, values[name])
            elif name in self._places:
                self._value(name)
        return self._made

    def _result(self, name: str, value: Value) -> None:
        """A local that the forward returns, under its own name."""
        made = self._tensor(value)
        if made == name:
            return
        if name in self._made.shapes:
            self._add(Statement(name, "alias", local(made)), value)
        else:
            self._as_traced(self._places[name])  # a cast or a copy

    def _of_kind(self, value: Value) -> tuple[str, Value]:
        node = value.node
        if isinstance(node, Source) and node in self._sources:
            return self._sources[node], Value(node, rows_of(node.shape), node.shape)
        kinds: Mapping[type[Node], Callable[[_Emission, Value], tuple[str, Value]]] = {
            Linear: _Emission._linear,
            Product: _Emission._product,
            Pair: _Emission._pair,
            Activation: _Emission._activation,
            Norm: _Emission._norm,
            Concatenation: _Emission._concatenation,
        }
        kind = kinds.get(type(node))
        return self._whole(value) if kind is None else kind(self, value)

    def _linear(self, value: Value) -> tuple[str, Value]:
        node = value.node
        if not isinstance(node, Linear) or (node.site is None and not self._is_mixed(node)):
            return self._whole(value)
        if node.bias is not None and node.unbiased in self._shared:
            return self._sum_with_bias(node, value)
        made = self._rows(node, value)
        lead = translated(made.dims[:-1], node.rows)
        if lead is None:
            raise CannotEmitError
        k = merged(node.k)
        k_size = size_of(node.k, len(node.shape[0]))
        x = self._input(node, Value(node.x, (*lead, k), (*made.shape[:-1], k_size)))
        n_size = made.shape[-1]
        found = weight_ref(Value(node.weight, (merged(node.weight_n), merged(node.weight_k)), (n_size, k_size)))
        bias = None if node.bias is None else weight_ref(node.bias)
        if found is None or (bias is None and node.bias is not None):
            raise CannotEmitError
        weight = _straight(*found)
        given = (local(x), weight) if bias is None else (local(x), weight, bias[0])
        call = None if node.site is None else SiteCall(node.site, *given)
        return self._emit(WEIGHTED if call is None else node.kind, function("linear", *given), made, call)

    def _is_mixed(self, node: Linear) -> bool:
        """True for a product of the embeddings of a mixing layer, along these."""
        straight = self._straight.get(node.x)
        return straight is not None and merged(node.k) == straight.dims[1]

    def _input(self, node: Linear, wanted: Value) -> str:
        """What a product multiplies; for a mixing layer, a view of (samples, embeddings, dimension)."""
        straight = self._straight.get(node.x)
        if straight is None or not self._is_mixed(node):
            return self._tensor(wanted, any_strides=True)
        self._tensor(straight, any_strides=True)
        if wanted not in self._turned:
            self._turned[wanted] = self._viewed(straight, wanted)
        return self._turned[wanted]

    def _sum_with_bias(self, node: Linear, value: Value) -> tuple[str, Value]:
        """A product that something else reads, too, and the sum with its bias."""
        made = self._rows(node, value)
        bias = None if node.bias is None else weight_ref(node.bias)
        if node.unbiased is None or bias is None:
            raise CannotEmitError
        product = self._tensor(Value(node.unbiased, made.dims, made.shape), any_strides=True)
        return self._emit("add", paired("add", local(product), bias[0]), made)

    def _rows(self, node: Linear, value: Value) -> Value:
        """The layout of a product: rows of all columns, with the dimensions that the forward has where that fits."""

        shown = [self._graph.made[place] for place in self._graph.holders.get(node, [])]
        candidates = [value, *(each for each in shown if each is not None)]
        straight = self._straight.get(node.x)
        if straight is not None and self._is_mixed(node):
            shape = (straight.shape[0], straight.shape[2], node.shape[-1])
            dims = regrouped([piece for dim in rows_of(node.shape) for piece in dim], shape)
            candidates += [] if dims is None else [Value(node, dims, shape)]
        return product_layout(node, candidates)

    def _product(self, value: Value) -> tuple[str, Value]:
        node = value.node
        if not isinstance(node, Product):
            raise CannotEmitError
        mixed = node.left in self._straight and isinstance(node.right, Linear) and self._is_mixed(node.right)
        if not mixed and node in self._graph.holders:
            return self._whole(value)
        made = Value(node, rows_of(node.shape), node.shape)
        of_left = (translated((made.dims[0],), node.batch[0]), translated((made.dims[1],), node.rows))
        of_right = (translated((made.dims[0],), node.batch[1]), translated((made.dims[2],), node.columns))
        if None in of_left or None in of_right:
            raise CannotEmitError
        k = size_of(node.k[0], len(node.shape[0]))
        batch, rows, columns = node.shape
        left_dims = (*(of_left[0] or ()), *(of_left[1] or ()), merged(node.k[0]))
        right_dims = (*(of_right[0] or ()), merged(node.k[1]), *(of_right[1] or ()))
        left = self._tensor(Value(node.left, left_dims, (batch, rows, k)), any_strides=True)
        right = self._tensor(Value(node.right, right_dims, (batch, k, columns)), any_strides=True)
        return self._emit("matmul", Call("torch.matmul", (local(left), local(right))), made)

    def _preferred(self, value: Value) -> Value:
        """The layout of a sum or product: the wanted one, if the product with a weight in it can have that."""
        node: Node = value.node
        while isinstance(node, Pair | Activation):
            if isinstance(node, Activation):
                node = node.x
                continue
            inner = [each for each in node.operands if each.node.shape == node.shape and not is_weight(each.node)]
            same = [each.node for each in inner if all(s.stride == s.other for s in each.steps)]
            of_gemm = [each for each in same if self._is_of_gemm(each) and not isinstance(each, Norm)]
            if not of_gemm:
                return value
            node = next((each for each in of_gemm if isinstance(each, Linear)), of_gemm[0])
        if not isinstance(node, Linear):
            return value
        found = self._rows(node, Value(node, value.dims, value.shape))
        return Value(value.node, found.dims, found.shape)

    def _pair(self, value: Value) -> tuple[str, Value]:
        node, made = value.node, self._preferred(value)
        if not isinstance(node, Pair):
            raise CannotEmitError
        if not made.shape:  # a number
            return self._whole(value)
        operands: dict[int, Ref] = {}
        # What a GEMM makes comes last, next to the sum or product.
        for number in sorted(range(2), key=lambda each: self._is_of_gemm(node.operands[each].node)):
            operand = node.operands[number]
            dims = translated(made.dims, operand.steps)
            if dims is None:
                return self._whole(value)
            one = (1,) * len(made.shape[0])
            shape = tuple(size if dim else one for dim, size in zip(dims, made.shape, strict=True))
            given = _without_leading_ones(Value(operand.node, dims, shape))
            if is_weight(operand.node):
                weight = weight_ref(given)
                if weight is None:
                    return self._whole(value)
                operands[number] = Ref(RefKind.ATTRIBUTE, f"{weight[0].text}.t()") if weight[1] else weight[0]
            else:
                operands[number] = local(self._tensor(given, any_strides=True))
        if node.cast is not None and operands[1 - node.cast].kind is RefKind.LOCAL:
            cast, other = operands[node.cast], operands[1 - node.cast]
            name = self._fresh("_".join((*re.findall(r"\w+", cast.text.removeprefix("self.")), "cast")))
            self._add(Statement(name, "to", method(cast, "to", Call("getattr", (other, "dtype")))), made)
            operands[node.cast] = local(name)
        return self._emit(node.op, paired(node.op, operands[0], operands[1]), made)

    def _activation(self, value: Value) -> tuple[str, Value]:
        node, made = value.node, self._preferred(value)
        if not isinstance(node, Activation):
            raise CannotEmitError
        of = Value(node.x, made.dims, made.shape)
        fixed = self._rows(node.x, of) if isinstance(node.x, Linear) else of
        if isinstance(node.x, Norm):  # of the rows, of which blocks are a view
            blocks = self._blocks(node.x) is not None
            fixed = self._preferred(Value(node.x.x, (), ())) if blocks else self._normed(node.x, of)
        made = Value(node, fixed.dims, fixed.shape)
        x = self._tensor(Value(node.x, made.dims, made.shape), any_strides=True)
        called = Call(f"torch.{node.name}", (local(x),)) if node.name in _OF_TORCH else function(node.name, local(x))
        return self._emit(node.name, called, made)

    def _norm(self, value: Value) -> tuple[str, Value]:
        node = value.node
        if not isinstance(node, Norm):
            raise CannotEmitError
        made = self._normed(node, value)
        if self._blocks(node) is not None:  # rows first, of which blocks are a view
            self._tensor(self._preferred(Value(node.x, (), ())), any_strides=True)
        x = self._tensor(self._without_cast(Value(node.x, made.dims, made.shape)), any_strides=True)
        vectors: list[Arg] = []
        for vector in (node.weight, node.bias) if node.kind == "layer_norm" else (node.weight,):
            found = None if vector is None else weight_ref(vector)
            if vector is not None and found is None:
                raise CannotEmitError
            vectors.append(None if found is None else found[0])
        return self._emit(node.kind, function(node.kind, local(x), made.shape[-1][:1], *vectors, node.eps), made)

    def _without_cast(self, value: Value) -> Value:
        """What a norm reads before it is cast: it computes in float32, whatever that is."""
        of = self._graph.casts.get(value.node)
        steps = None if of is None else steps_along(rows_of(value.node.shape), of.dims, value.node.shape)
        dims = None if steps is None else translated(value.dims, steps)
        return value if of is None or dims is None else Value(of.node, dims, value.shape)

    def _normed(self, node: Norm, value: Value) -> Value:
        """The layout of a norm: what it is over is the last dimension."""
        along, runs = merged(node.over), len(node.shape[0])
        x = node.x
        joined = isinstance(x, Concatenation) or (
            isinstance(x, Pair) and any(isinstance(each.node, Concatenation) for each in x.operands)
        )
        ordered = not joined or all(is_fixed(size) for size in value.shape[1:])
        blocks = self._blocks(node)
        if blocks is not None:
            return blocks
        plain = all(value.dims)  # no dimension of one element
        if plain and value.dims and value.dims[-1] == along and is_fixed(value.shape[-1]) and ordered:
            return value
        shown = [self._graph.made[place] for place in self._graph.holders.get(node, [])]
        for each in (*(one for one in shown if one is not None), value):
            pairs = list(zip(each.dims, each.shape, strict=True))
            lead = [pair for pair in pairs if pair[0] and not is_within(pair[0], along)]
            inside = [pair[0] for pair in pairs if pair[0] and pair not in lead]
            if not inside or total((piece.size for dim in inside for piece in dim), runs) != size_of(along, runs):
                continue
            # The samples come first, then what is outer in the value.
            lead.sort(key=lambda pair: (not is_fixed(pair[1]), pair[0][0].stride), reverse=True)
            dims, shape = tuple(pair[0] for pair in lead), tuple(pair[1] for pair in lead)
            return Value(node, (*dims, along), (*shape, size_of(along, runs)))
        raise CannotEmitError

    def _blocks(self, node: Norm) -> Value | None:
        """The layout of a norm over blocks of the columns of a product: (rows, blocks, columns of a block)."""
        whole = self._preferred(Value(node.x, (), ()))
        if not whole.dims or len(node.over) != 1:
            return None
        (block,), n = node.over, whole.shape[-1]
        count = over(n, block.size)
        one = (1,) * len(n)
        if count is None or count == one or whole.dims[-1] != (Piece(n, one),) or block.stride != one:
            return None
        dims = (*whole.dims[:-1], (Piece(count, block.size),), (block,))
        return Value(node, dims, (*whole.shape[:-1], count, block.size))

    def _concatenation(self, value: Value) -> tuple[str, Value]:
        node = value.node
        if not isinstance(node, Concatenation):
            raise CannotEmitError
        one = (1,) * len(node.shape[0])
        if all(part.shape[node.dim] == one for part in node.parts) and node in self._graph.holders:
            return self._whole(value)  # a stack
        natural = rows_of(node.shape)
        order = [natural.index(dim) for dim in value.dims if dim in natural and dim]
        if sorted(order) == list(range(len(natural))) and len(value.dims) == len(natural):
            return self._side_by_side(node, value, order) or self._whole(value)
        return (
            self._in_rows(node, value)
            or self._side_by_side(node, Value(node, natural, node.shape))
            or self._whole(value)
        )

    def _side_by_side(
        self, node: Concatenation, made: Value, order: Sequence[int] | None = None
    ) -> tuple[str, Value] | None:
        """The concatenation of parts whose dimensions are in this order."""
        order = range(len(made.dims)) if order is None else order
        names: list[Arg] = []
        for part in node.parts:
            if is_weight(part.node):
                return None
            dims, shape = tuple(part.dims[each] for each in order), tuple(part.shape[each] for each in order)
            ordered = Value(part.node, dims, shape)
            names.append(local(self._tensor(ordered, any_strides=True)))
        return self._joined(names, list(order).index(node.dim), made)

    def _in_rows(self, node: Concatenation, value: Value) -> tuple[str, Value] | None:
        """The concatenation of (samples, columns) as one of (samples, rows, columns of a row)."""
        if len(node.shape) != 2 or node.dim != 1 or len(value.shape) != 3 or value.shape[0] != node.shape[0]:
            return None
        if regrouped([piece for dim in rows_of(node.shape) for piece in dim], value.shape) != value.dims:
            return None
        names: list[Arg] = []
        for part in node.parts:
            rows = over(part.shape[1], value.shape[2])
            shape = None if rows is None else (part.shape[0], rows, value.shape[2])
            dims = None if shape is None else regrouped([piece for dim in part.dims for piece in dim], shape)
            if shape is None or dims is None or is_weight(part.node):
                return None
            names.append(local(self._tensor(Value(part.node, dims, shape), any_strides=True)))
        return self._joined(names, 1, value)

    def _joined(self, names: Sequence[Arg], dim: int, made: Value) -> tuple[str, Value]:
        return self._emit("cat", Call("torch.cat", (Call("list", tuple(names)), dim)), made)


def _straight(weight: Ref, flipped: bool) -> Arg:
    return method(weight, "t") if flipped else weight


def _without_leading_ones(value: Value) -> Value:
    place = 0
    while place < len(value.dims) - 1 and not value.dims[place]:
        place += 1
    return Value(value.node, value.dims[place:], value.shape[place:])
