"""A canonical graph as statements that patterns match: each node as the one torch call that kernels take.

What a node reads is made just before it, so that the operations that one kernel takes stand together. What has no
canonical form is there as it was traced.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from loka.graph.canonical.kernel_layouts import KernelLayouts
from loka.graph.canonical.layout import Size, is_fixed, merged, over, regrouped, rows_of, size_of, translated
from loka.graph.canonical.lowering import Lowered
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
from loka.graph.canonical.views import CannotEmitError, is_permuted, moves, weight_ref
from loka.graph.expression import Arg, Call, Ref, RefKind, function, local, locals_in, method
from loka.graph.ir import RMS_NORM_EPS, WEIGHTED, Shape, SiteCall, Statement

_OF_TORCH = frozenset({"sigmoid", "tanh"})  # those of torch.nn.functional are deprecated


@dataclass(slots=True)
class Made:
    """The statements of a forward in canonical form, and the shapes of their targets."""

    statements: list[Statement] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)


def kernel_statements(
    statements: Sequence[Statement],
    result: Arg,
    arguments: Sequence[str],
    graph: Lowered,
    result_values: Mapping[str, Value],
) -> Made:
    """All statements that the effects and the result of a forward need. Raises CannotEmitError.

    `arguments` are the names of its arguments, `result` is what it returns, and `result_values` the tensors of the
    locals in that.
    """
    writer = _Writer(statements, arguments, graph, result_values)
    for place in sorted(graph.effects):
        writer.traced(place)
    for name in locals_in(result):
        writer.result(name)
    return writer.made


class _Writer:
    """Makes each tensor when something reads it; a tensor has the name of the traced local that is the same one."""

    def __init__(
        self, statements: Sequence[Statement], arguments: Sequence[str], graph: Lowered, results: Mapping[str, Value]
    ) -> None:
        self.made = Made()
        self._statements, self._graph, self._results = statements, graph, results
        self._layouts = KernelLayouts(graph)
        self._places = {step.target: place for place, step in enumerate(statements) if step.target != "_"}
        self._taken = {*self._places, *arguments}
        self._returned = {value: name for name, value in results.items()}
        self._sources = {value.node: name for name in arguments if (value := graph.arguments.get(name)) is not None}
        self._names: dict[Value, str] = {}
        self._first: dict[Node, Value] = {}  # the layout in which a node was made
        self._turned: dict[Value, str] = {}  # views of embeddings that products read
        self._traced: dict[int, str] = {}
        self._permuted: dict[str, int] = {}  # the statements that make permuted views

    # Statements as they were traced

    def traced(self, place: int) -> str:
        """The local that a statement makes, with the statement as it was traced."""
        if place in self._traced:
            return self._traced[place]
        step, value = self._statements[place], self._graph.made[place]
        read = {ref: self._operand(ref, place) for ref in step.operands}
        self._add(step.reads(read.__getitem__), value)
        self._traced[place] = step.target
        if value is not None:
            self._names.setdefault(value, step.target)
            self._first.setdefault(value.node, value)
        return step.target

    def _operand(self, ref: Ref, place: int) -> Ref:
        if ref.kind is not RefKind.LOCAL:
            return ref
        value = self._graph.read[place].get(ref.text)
        return local(self._value(ref.text) if value is None else self._as_strided(value))

    def _value(self, name: str) -> str:
        """A local that is no tensor: an argument, a size, a tuple of tensors."""
        place = self._places.get(name)
        return name if place is None else self.traced(place)

    def result(self, name: str) -> None:
        """A local that the forward returns, under its own name."""
        if name not in self._results:
            self._value(name)
            return
        value = self._results[name]
        made = self._as_strided(value)
        if made != name and name in self.made.shapes:
            self._add(Statement(name, "alias", local(made)), value)
        elif made != name:
            self.traced(self._places[name])  # a cast or a copy

    # Tensors

    def _tensor(self, value: Value) -> str:
        """A local with the elements of a value in its layout."""
        if value not in self._names:
            if value.node not in self._first:
                self._make(value)
            if value not in self._names:
                self._names[value] = self._viewed(self._first[value.node], value)
        return self._names[value]

    def _as_strided(self, value: Value) -> str:
        """The same, contiguous where it was as traced: what is not looked into may rely on that."""
        name = self._tensor(value)
        if name in self._permuted and self._was_contiguous(value):
            place = self._permuted.pop(name)
            step = self.made.statements[place]
            self.made.statements[place] = replace(step, value=method(step.value, "contiguous"))
        return name

    def _viewed(self, first: Value, wanted: Value) -> str:
        """A tensor in another layout."""
        one = (1,) * len((*wanted.shape, (1, 1))[0])
        shape = tuple(size if dim else one for dim, size in zip(wanted.dims, wanted.shape, strict=True))
        if shape != wanted.shape:  # broadcast
            return self._tensor(Value(wanted.node, wanted.dims, shape))
        name, steps = self._names[first], moves(first, wanted)
        if steps is None:
            raise CannotEmitError
        holder, permuted = self._holder(wanted), False
        for number, (change, shape) in enumerate(steps, 1):
            called = change(local(name))
            target = self._target(wanted, name) if number == len(steps) else self._fresh(f"{name}_view")
            op = called.target.removeprefix(".")
            permuted |= is_permuted(called)
            if number == len(steps) and permuted:
                self._permuted[target] = len(self.made.statements)
            note = self._statements[holder].note if holder is not None else ""
            self.made.statements.append(Statement(target, op, called, note=note))
            self.made.shapes[target] = _printed(shape)
            name = target
        return name

    def _was_contiguous(self, value: Value) -> bool:
        places = self._graph.holders.get(value.node, [])
        return any(place in self._graph.contiguous and self._graph.made[place] == value for place in places)

    def _make(self, value: Value) -> None:
        """Makes a node, in the wanted layout where it can be had; dimensions of one element are a view of it."""
        pairs = [pair for pair in zip(value.dims, value.shape, strict=True) if pair[0]]
        traced = self._holder(value) is not None and not self._layouts.is_of_gemm(value.node)
        if isinstance(value.node, Pair | Activation) and 0 < len(pairs) < len(value.dims) and not traced:
            value = Value(value.node, tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
        name, made = self._of_kind(value)
        self._first[value.node] = made
        self._names[made] = name

    def _of_kind(self, value: Value) -> tuple[str, Value]:
        """Makes a node: the local, and the layout that it has."""
        match value.node:
            case Source() as node if node in self._sources:
                return self._sources[node], Value(node, rows_of(node.shape), node.shape)
            case Linear() as node if node.site is not None or self._layouts.is_mixed(node):
                return self._linear(node, self._layouts.product(node, value))
            case Product() as node:
                return self._product(node, value)
            case Pair() as node if value.shape:  # no number
                return self._pair(node, self._layouts.pair(value)) or self._whole(value)
            case Activation() as node:
                return self._activation(node, self._layouts.activation(node, value))
            case Norm() as node:
                return self._norm(node, self._layouts.norm(node, value))
            case Concatenation() as node:
                return self._concatenation(node, value)
        return self._whole(value)

    def _whole(self, value: Value) -> tuple[str, Value]:
        """A node as it was traced."""
        node = value.node
        places = self._graph.holders.get(node, [])
        if not places:
            raise CannotEmitError(f"{type(node).__name__} of {self._statements[node.place].text()}")
        exact = [place for place in places if self._graph.made[place] == value]
        place = (exact or places)[0]
        name, made = self.traced(place), self._graph.made[place]
        if made is None:
            raise CannotEmitError
        return name, made

    # Kinds of nodes

    def _linear(self, node: Linear, made: Value) -> tuple[str, Value]:
        bias = None if node.bias is None else weight_ref(node.bias)
        if bias is None and node.bias is not None:
            raise CannotEmitError
        if bias is not None and node.unbiased is not None and self._is_read_besides(node.unbiased):
            product = self._tensor(Value(node.unbiased, made.dims, made.shape))
            return self._emit("add", _paired("add", local(product), bias[0]), made)
        lead = translated(made.dims[:-1], node.rows)
        k_size, n_size = size_of(node.k, len(node.shape[0])), made.shape[-1]
        weight = weight_ref(Value(node.weight, (merged(node.weight_n), merged(node.weight_k)), (n_size, k_size)))
        if lead is None or weight is None:
            raise CannotEmitError
        x = local(self._input(node, Value(node.x, (*lead, merged(node.k)), (*made.shape[:-1], k_size))))
        matrix: Arg = method(weight[0], "t") if weight[1] else weight[0]
        given = (x, matrix) if bias is None else (x, matrix, bias[0])
        call = None if node.site is None else SiteCall(node.site, *given)
        return self._emit(WEIGHTED if call is None else "linear", function("linear", *given), made, call)

    def _is_read_besides(self, product: Node) -> bool:
        """True for a product that something reads besides the sum with its bias."""
        returned = any(value.node is product for value in self._results.values())
        return returned or not self._graph.read_once(product)

    def _input(self, node: Linear, wanted: Value) -> str:
        """What a product multiplies; for a mixing layer, a view of (samples, embeddings, dimension)."""
        if not self._layouts.is_mixed(node):
            return self._tensor(wanted)
        embeddings = self._layouts.embeddings[node.x]
        self._tensor(embeddings)
        if wanted not in self._turned:
            self._turned[wanted] = self._viewed(embeddings, wanted)
        return self._turned[wanted]

    def _product(self, node: Product, value: Value) -> tuple[str, Value]:
        layouts = self._layouts
        mixed = node.left in layouts.embeddings and isinstance(node.right, Linear) and layouts.is_mixed(node.right)
        made = Value(node, rows_of(node.shape), node.shape)
        of_left = (translated((made.dims[0],), node.batch[0]), translated((made.dims[1],), node.rows))
        of_right = (translated((made.dims[0],), node.batch[1]), translated((made.dims[2],), node.columns))
        with_itself = node.left is node.right and of_left == of_right and merged(node.k[0]) == merged(node.k[1])
        if not (mixed or with_itself) and node in self._graph.holders:
            return self._whole(value)
        if None in of_left or None in of_right:
            raise CannotEmitError
        k = size_of(node.k[0], len(node.shape[0]))
        batch, rows, columns = node.shape
        left_dims = (*(of_left[0] or ()), *(of_left[1] or ()), merged(node.k[0]))
        right_dims = (*(of_right[0] or ()), merged(node.k[1]), *(of_right[1] or ()))
        of_rows = Value(node.left, left_dims, (batch, rows, k))
        of_columns = Value(node.right, right_dims, (batch, k, columns))
        left = self._tensor(of_rows)
        if with_itself and of_columns not in self._names:
            self._names[of_columns] = self._viewed(of_rows, of_columns)
        return self._emit("matmul", Call("torch.matmul", (local(left), local(self._tensor(of_columns)))), made)

    def _pair(self, node: Pair, made: Value) -> tuple[str, Value] | None:
        """A sum or product; None where a tensor in it has no such layout."""
        operands: dict[int, Ref] = {}
        nodes = [operand.node for operand in node.operands]

        def rank(number: int) -> tuple[bool, bool, bool]:
            """What a GEMM makes comes last, next to the sum or product; of such a norm, or what gates the other."""
            made, gates = nodes[number], node.op == "mul" and isinstance(nodes[number], Activation)
            return self._layouts.is_of_gemm(made), isinstance(made, Norm), gates

        for number in sorted(range(2), key=rank):
            operand = node.operands[number]
            dims = translated(made.dims, operand.steps)
            if dims is None:
                return None
            one = (1,) * len(made.shape[0])
            shape = tuple(size if dim else one for dim, size in zip(dims, made.shape, strict=True))
            given = _without_leading_ones(Value(operand.node, dims, shape))
            if not any(given.dims):  # a number, whose dtype does not tell where it has no dimension
                given = Value(operand.node, rows_of(operand.node.shape), operand.node.shape)
            if is_weight(operand.node):
                weight = weight_ref(given)
                if weight is None:
                    return None
                operands[number] = Ref(RefKind.ATTRIBUTE, f"{weight[0].text}.t()") if weight[1] else weight[0]
            else:
                operands[number] = local(self._tensor(given))
        if node.cast is not None and operands[1 - node.cast].kind is RefKind.LOCAL:
            cast, other = operands[node.cast], operands[1 - node.cast]
            name = self._fresh("_".join((*re.findall(r"\w+", cast.text.removeprefix("self.")), "cast")))
            self._add(Statement(name, "to", method(cast, "to", Call("getattr", (other, "dtype")))), made)
            operands[node.cast] = local(name)
        return self._emit(node.op, _paired(node.op, operands[0], operands[1]), made)

    def _activation(self, node: Activation, made: Value) -> tuple[str, Value]:
        x = local(self._tensor(Value(node.x, made.dims, made.shape)))
        called = Call(f"torch.{node.name}", (x,)) if node.name in _OF_TORCH else function(node.name, x, *node.constants)
        return self._emit(node.name, called, made)

    def _norm(self, node: Norm, made: Value) -> tuple[str, Value]:
        if self._layouts.blocks(node) is not None:  # rows first, of which blocks are a view
            self._tensor(self._layouts.pair(Value(node.x, (), ())))
        x = self._tensor(self._layouts.without_cast(Value(node.x, made.dims, made.shape)))
        vectors: list[Arg] = []
        for vector in (node.weight, node.bias) if node.kind == "layer_norm" else (node.weight,):
            found = None if vector is None else weight_ref(vector)
            if vector is not None and found is None:
                raise CannotEmitError
            vectors.append(None if found is None else found[0])
        eps = None if node.kind == "rms_norm" and node.eps == RMS_NORM_EPS else node.eps
        return self._emit(node.kind, function(node.kind, local(x), made.shape[-1][:1], *vectors, eps), made)

    def _concatenation(self, node: Concatenation, value: Value) -> tuple[str, Value]:
        one = (1,) * len(node.shape[0])
        if all(part.shape[node.dim] == one for part in node.parts) and node in self._graph.holders:
            return self._whole(value)  # a stack
        if any(is_weight(part.node) for part in node.parts):
            return self._whole(value)
        natural = rows_of(node.shape)
        order = [natural.index(dim) for dim in value.dims if dim in natural and dim]
        if sorted(order) == list(range(len(natural))) and len(value.dims) == len(natural):
            return self._side_by_side(node, value, order)
        made = self._in_rows(node, value)
        return made or self._side_by_side(node, Value(node, natural, node.shape), range(len(natural)))

    def _side_by_side(self, node: Concatenation, made: Value, order: Sequence[int]) -> tuple[str, Value]:
        """The concatenation of parts whose dimensions are in this order."""
        names: list[Arg] = []
        for part in node.parts:
            dims, shape = tuple(part.dims[each] for each in order), tuple(part.shape[each] for each in order)
            names.append(local(self._tensor(Value(part.node, dims, shape))))
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
            if shape is None or dims is None:
                return None
            names.append(local(self._tensor(Value(part.node, dims, shape))))
        return self._joined(names, 1, value)

    def _joined(self, names: Sequence[Arg], dim: int, made: Value) -> tuple[str, Value]:
        return self._emit("cat", Call("torch.cat", (Call("list", tuple(names)), dim)), made)

    # Names and notes

    def _holder(self, value: Value) -> int | None:
        """The statement that makes a tensor of this node in this layout."""
        places = self._graph.holders.get(value.node, [])
        return next((place for place in places if self._graph.made[place] == value), None)

    def _target(self, value: Value, otherwise: str) -> str:
        """The name of the local that has a value in the forward as it was traced, or a new one."""
        returned = self._returned.get(value)
        if returned is not None and returned not in self.made.shapes:
            return returned
        place = self._holder(value)
        if place is None:
            places = self._graph.holders.get(value.node, [])
            return self._fresh(f"{self._statements[places[0]].target if places else otherwise}_rows")
        name = self._statements[place].target
        if name == "_":
            return self._fresh(otherwise)
        return self._fresh(name) if name in self.made.shapes else name

    def _fresh(self, name: str) -> str:
        number, found = 1, name
        while found in self._taken or found == "_":
            number += 1
            found = f"{name}_{number}"
        self._taken.add(found)
        return found

    def _add(self, step: Statement, value: Value | None) -> None:
        self.made.statements.append(step)
        if value is not None and step.target != "_":
            self.made.shapes[step.target] = _printed(value.shape)

    def _emit(self, op: str, called: Call, value: Value, call: SiteCall | None = None) -> tuple[str, Value]:
        """A canonical statement."""
        target = self._target(value, op)
        self._add(Statement(target, op, called, call, self._note(value, self._holder(value))), value)
        return target, value

    def _note(self, value: Value, place: int | None) -> str:
        places = self._graph.holders.get(value.node, []) if place is None else [place]
        return self._statements[places[0] if places else max(value.node.place, 0)].note


def _paired(op: str, left: Arg, right: Arg) -> Call:
    """A sum ("add") or a product ("mul") of two tensors."""
    return Call(f"operator.{op}", (left, right))


def _printed(shape: Sequence[Size]) -> Shape:
    return tuple(size[0] if is_fixed(size) else None for size in shape)


def _without_leading_ones(value: Value) -> Value:
    place = 0
    while place < len(value.dims) - 1 and not value.dims[place]:
        place += 1
    return Value(value.node, value.dims[place:], value.shape[place:])
