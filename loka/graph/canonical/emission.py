"""From the canonical graph back to statements: each node as torch's own statement of it, in one order.

What a node reads is made just before it, so that the operations that one kernel takes stand together. A statement that
is canonical as it was traced stays, and so does everything that has no canonical form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from loka.graph.canonical.layout import (
    Dims,
    Piece,
    Size,
    is_fixed,
    merged,
    move,
    over,
    regrouped,
    rows_of,
    size_of,
    translated,
)
from loka.graph.canonical.live import embeddings_of, shared_products
from loka.graph.canonical.lowering import Lowered
from loka.graph.canonical.nodes import (
    Activation,
    Concatenation,
    Linear,
    Node,
    Norm,
    Other,
    Pair,
    Parameter,
    Part,
    Product,
    Source,
    Value,
    is_weight,
)
from loka.graph.canonical.views import CannotEmitError, permutation_text, reshape_text
from loka.graph.canonical.weights import weight_text
from loka.graph.ir import REASSOCIATED, WEIGHTED, Ref, RefKind, SiteCall, Statement
from loka.graph.patterns.concat_norm import concatenated
from loka.graph.patterns.norm import parse_norm
from loka.graph.trace.observed_shapes import Shape

_NAME = re.compile(r"\b[A-Za-z_]\w*\b")
_PLAIN = {"add": "{0} + {1}", "mul": "{0} * {1}"}
_PRODUCTS = frozenset({"torch.matmul({0}, {1})", "{0} @ {1}"})
_F = "torch.nn.functional"


@dataclass(slots=True)
class Emitted:
    """The statements of a forward in canonical form, and the shapes of their targets."""

    statements: list[Statement] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)


def emitted(
    statements: Sequence[Statement], result: str, arguments: Sequence[str], graph: Lowered, result_values: Mapping[str, Value]
) -> Emitted:
    """The canonical statements of a forward. Raises CannotEmitError.

    `arguments` are the names of its arguments, `result` the text of what it returns, and `result_values` the tensors of
    the locals in that text.
    """
    return _Emission(statements, arguments, graph).all(result, result_values)


class _Emission:
    def __init__(self, statements: Sequence[Statement], arguments: Sequence[str], graph: Lowered) -> None:
        self._statements, self._graph, self._arguments = statements, graph, arguments
        self._places = {step.target: place for place, step in enumerate(statements) if step.target != "_"}
        self._taken = {*self._places, *arguments}
        self._shared: frozenset[Node] = frozenset()
        self._returned: dict[tuple[Node, Dims, tuple[Size, ...]], str] = {}  # names of results
        self._straight = embeddings_of(graph)
        self._made = Emitted()
        self._names: dict[tuple[Node, Dims, tuple[Size, ...]], str] = {}
        self._first: dict[Node, Value] = {}  # the layout in which a node was made
        self._turned: dict[tuple[Node, Dims, tuple[Size, ...]], str] = {}  # views of embeddings that products read
        self._of_gemm: dict[Node, bool] = {}
        self._scattered: set[str] = set()  # locals that are permuted views
        self._traced: dict[int, str] = {}
        self._plain: dict[str, str] = {}
        self._sources = {
            value.node: name
            for name in arguments
            if (value := _argument(name, graph)) is not None
        }

    def all(self, result: str, values: Mapping[str, Value]) -> Emitted:
        """All statements that the result and the effects need."""
        roots = [place for place in sorted(self._graph.effects) if not self._is_needless(place)]
        self._shared = shared_products(self._graph, roots, [value.node for value in values.values()])
        returned = {name: value for name, value in values.items() if name not in self._graph.changed}
        self._returned = {(value.node, value.dims, value.shape): name for name, value in returned.items()}
        for place in roots:
            self._as_traced(place)
        for name in dict.fromkeys(_NAME.findall(result)):
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
        if name in self._graph.changed or name in self._made.shapes:
            self._add(Statement(name, "alias", "{0}", (Ref(RefKind.LOCAL, made),)), value)
        else:
            self._as_traced(self._places[name])  # a cast or a copy

    # Statements as they were traced

    def _as_traced(self, place: int) -> str:
        """The local that a statement makes, with the statement as it was traced."""
        if place in self._traced:
            return self._traced[place]
        step = self._statements[place]
        operands = self._before_change(tuple(self._operand(ref, place) for ref in step.operands), place)
        value = self._graph.made[place]
        name = step.target
        if name == "_" and value is not None and place not in self._graph.effects:  # others read it: what it changes
            name = self._fresh(step.op.strip("_"))
        elif name != "_" and name in self._graph.changed:
            name = self._fresh(name)
        self._add(replace(step, target=name, operands=operands), value)
        self._traced[place] = name
        if value is not None:
            self._names.setdefault((value.node, value.dims, value.shape), name)
            self._first.setdefault(value.node, value)
        return name

    def _before_change(self, operands: tuple[Ref, ...], place: int) -> tuple[Ref, ...]:
        """The operands of a statement, with a copy of the one that it changes where others read that as it was."""
        node, reads = self._graph.changes.get(place), enumerate(self._graph.read)
        others = (read for other, read in reads if other != place and self._graph.made[other] is not None)
        if node is None or not any(value.node is node for read in others for value in read.values()):
            return operands
        made: list[Ref] = []
        for ref, old in zip(operands, self._statements[place].operands, strict=True):
            value = self._graph.read[place].get(old.text) if old.kind is RefKind.LOCAL else None
            if value is not None and value.node is node:
                ref = Ref(RefKind.LOCAL, self._fresh(f"{ref.text}_copy"))
                copied = Statement(ref.text, "clone", "{0}.clone()", (self._operand(old, place),))
                self._add(copied, value)
            made.append(ref)
        return tuple(made)

    def _operand(self, ref: Ref, place: int) -> Ref:
        if ref.kind is not RefKind.LOCAL:
            return ref
        value = self._graph.read[place].get(ref.text)
        return Ref(RefKind.LOCAL, self._value(ref.text) if value is None else self._tensor(value))

    def _value(self, name: str) -> str:
        """A local that is no tensor: an argument, a size, a tuple of tensors."""
        place = self._places.get(name)
        if place is None:
            return name
        if name in self._plain:
            return self._plain[name]
        step = self._statements[place]
        given = self._graph.fixed.get(name)
        sizes = given if isinstance(given, list) and all(type(each) is int for each in given) else None
        if sizes is not None and not self._reads_sources(place):
            text, operands = self._size_text(tuple(sizes))
            self._made.statements.append(Statement(name, "size", text, operands, note=step.note))
            self._plain[name] = name
        else:
            self._plain[name] = self._as_traced(place)
        return self._plain[name]

    def _size_text(self, sizes: Size) -> tuple[str, tuple[Ref, ...]]:
        """A size of a tensor that is made here, as a number or as a size of an argument."""
        if is_fixed(sizes):
            return str(sizes[0]), ()
        for node, name in self._sources.items():
            if sizes in node.shape:
                return f"{{0}}.size({node.shape.index(sizes)})", (Ref(RefKind.LOCAL, name),)
        raise CannotEmitError

    def _reads_sources(self, place: int) -> bool:
        """True if all tensors that a size is of are taken as they are."""
        step = self._statements[place]
        for ref in step.operands:
            if ref.kind is not RefKind.LOCAL:
                continue
            value = self._graph.read[place].get(ref.text)
            if value is not None and not isinstance(value.node, Source):
                return False
            if value is None and ref.text in self._places and not self._reads_sources(self._places[ref.text]):
                return False
        return True

    def _is_needless(self, place: int) -> bool:
        """True for a check of sizes that no call changes, of tensors that are made here."""
        step = self._statements[place]
        if step.target != "_" or step.op == "module" or self._reads_sources(place):
            return False
        return all(ref.kind is RefKind.LOCAL and self._is_constant(ref.text) for ref in step.operands)

    def _is_constant(self, name: str) -> bool:
        place = self._places.get(name)
        if place is None:
            return False
        step, read = self._statements[place], self._graph.read[place]
        given = self._graph.fixed.get(name)
        if not isinstance(given, list) or any(each != given[0] for each in given):
            return False
        if type(given[0]) is int and any(ref.text in read for ref in step.operands):
            return True
        of_shape = step.op in ("getitem", "item") and type(given[0]) is int
        return of_shape or all(
            ref.kind is RefKind.LOCAL and ref.text not in read and self._is_constant(ref.text) for ref in step.operands
        )

    # Tensors

    def _tensor(self, value: Value, hard: bool = False) -> str:
        """A local with the elements of a value in its layout; `hard`: what reads it needs this layout."""
        key = (value.node, value.dims, value.shape)
        if key not in self._names:
            if value.node not in self._first:
                self._make(value, hard)
            if key not in self._names:
                self._names[key] = self._viewed(self._first[value.node], value, hard)
        name = self._names[key]
        if hard or name not in self._scattered or not self._was_contiguous(value):
            return name
        self._names[key] = self._fresh(name)
        copied = Statement(self._names[key], "contiguous", "{0}.contiguous()", (Ref(RefKind.LOCAL, name),))
        self._add(copied, value)
        return self._names[key]

    def _was_contiguous(self, value: Value) -> bool:
        """True for a tensor that was contiguous as traced: what is not looked into may rely on it."""
        return self._holder(value) in self._graph.contiguous

    def _viewed(self, first: Value, wanted: Value, hard: bool = True) -> str:
        """A tensor in another layout."""
        if any(size_of(dim, len(size)) != size for dim, size in zip(wanted.dims, wanted.shape, strict=True)):
            return self._broadcast(first, wanted)
        step = move(first.dims, wanted.dims, first.shape, wanted.shape)
        if step is None:
            raise CannotEmitError
        name, shape = self._names[(first.node, first.dims, first.shape)], first.shape
        holder = self._holder(wanted)
        texts: list[tuple[str, tuple[Size, ...]]] = []
        if step.before is not None:
            texts.append((reshape_text(shape, step.before), step.before))
            shape = step.before
        if step.order is not None:
            moved = tuple(shape[place] for place in step.order)
            texts.append((permutation_text(step.order), moved))
            shape = moved
        if step.after is not None:
            texts.append((reshape_text(shape, step.after), step.after))
        for number, (text, made) in enumerate(texts):
            last = number == len(texts) - 1
            target = self._target(wanted, name) if last else self._fresh(f"{name}_view")
            note = self._statements[holder].note if holder is not None else ""
            kept = self._kept_view(holder, name, first) if last and number == 0 else None
            scattered = last and kept is None and step.order is not None and step.after is None
            if scattered and not hard and self._was_contiguous(wanted):
                text += ".contiguous()"
            elif scattered:
                self._scattered.add(target)
            made_by = kept or Statement(target, text.partition("(")[0].removeprefix("{0}."), text, (Ref(RefKind.LOCAL, name),), note=note)
            self._made.statements.append(replace(made_by, target=target))
            self._made.shapes[target] = _printed(made)
            name = target
        return name

    def _kept_view(self, holder: int | None, name: str, first: Value) -> Statement | None:
        """The traced statement of a view, where it is of the tensor that is there."""
        if holder is None:
            return None
        step, read = self._statements[holder], self._graph.read[holder]
        given = [ref for ref in step.operands if ref.text in read]
        if holder in self._graph.opaque or len(given) != 1:
            return None
        value = read[given[0].text]
        if self._names.get((value.node, value.dims, value.shape)) != name:
            return None
        if any(ref.kind is RefKind.LOCAL and ref.text not in read and not self._reads_sources(holder) for ref in step.operands):
            return None
        if step.call is not None or len(step.operands) > 1:
            return None
        return replace(step, operands=tuple(Ref(RefKind.LOCAL, name) if ref is given[0] else ref for ref in step.operands))

    def _broadcast(self, first: Value, wanted: Value) -> str:
        """A tensor with dimensions of one where it is broadcast."""
        shape = tuple(
            size if dim else (1,) * len(size) for dim, size in zip(wanted.dims, wanted.shape, strict=True)
        )
        return self._tensor(Value(wanted.node, wanted.dims, shape), hard=True)

    def _make(self, value: Value, hard: bool) -> None:
        """Makes a node, in the wanted layout where it can be had."""
        made = self._of_kind(value, hard)
        self._first[value.node] = made[1]
        self._names[(value.node, made[1].dims, made[1].shape)] = made[0]

    def _of_kind(self, value: Value, hard: bool) -> tuple[str, Value]:
        node = value.node
        if isinstance(node, Source) and node in self._sources:
            return self._sources[node], Value(node, rows_of(node.shape), node.shape)
        kinds: Mapping[type[Node], Callable[[_Emission, Value, bool], tuple[str, Value]]] = {
            Linear: _Emission._linear,
            Product: _Emission._product,
            Pair: _Emission._pair,
            Activation: _Emission._activation,
            Norm: _Emission._norm,
            Concatenation: _Emission._concatenation,
        }
        kind = kinds.get(type(node))
        return self._whole(value) if kind is None else kind(self, value, hard)

    def _whole(self, value: Value) -> tuple[str, Value]:
        """A node as it was traced."""
        node = value.node
        places = self._graph.holders.get(node, [])
        if not places:
            raise CannotEmitError(f"{type(node).__name__} of {self._statements[node.place].text()}")
        exact = [place for place in places if self._graph.made[place] == value]
        place = (exact or places)[0]
        name, made = self._as_traced(place), self._graph.made[place]
        if made is None:
            raise CannotEmitError
        return name, made

    def _holder(self, value: Value) -> int | None:
        """The statement that makes a tensor of this node in this layout."""
        places = self._graph.holders.get(value.node, [])
        return next((place for place in places if self._graph.made[place] == value), None)

    def _target(self, value: Value, otherwise: str) -> str:
        """The name of the local that has a value in the forward as it was traced, or a new one."""
        returned = self._returned.get((value.node, value.dims, value.shape))
        if returned is not None and returned not in self._made.shapes:
            return returned
        place = self._holder(value)
        if place is None:
            places = self._graph.holders.get(value.node, [])
            return self._fresh(f"{self._statements[places[0]].target if places else otherwise}_rows")
        name = self._statements[place].target
        used = name in self._made.shapes or name in self._graph.changed or name == "_"
        return self._fresh(name if name != "_" else otherwise) if used else name

    def _fresh(self, name: str) -> str:
        number, found = 1, name
        while found in self._taken or found == "_":
            number += 1
            found = f"{name}_{number}"
        self._taken.add(found)
        return found

    def _add(self, step: Statement, value: Value | None) -> None:
        self._made.statements.append(step)
        if value is not None and step.target != "_":
            self._made.shapes[step.target] = _printed(value.shape)

    def _emit(self, op: str, text: str, operands: Sequence[Ref], value: Value, call: SiteCall | None = None) -> tuple[str, Value]:
        """A canonical statement; the one that was traced, if that is canonical, too."""
        place = self._holder(value)
        target = self._target(value, op)
        note = self._note(value, place)
        step = Statement(target, op, text, tuple(operands), call, note)
        if place is not None and place not in self._graph.opaque:
            traced = self._statements[place]
            same = self._same_operands(traced, place, operands)
            if same and _is_canonical(traced, step):
                step = replace(traced, target=target, operands=same)
        self._add(step, value)
        return target, value

    def _note(self, value: Value, place: int | None) -> str:
        places = self._graph.holders.get(value.node, []) if place is None else [place]
        step = self._statements[places[0] if places else max(value.node.place, 0)]
        of_child = step.call is not None and step.call.site == step.note and isinstance(value.node, Product)
        return step.note.rpartition(".")[0] if of_child else step.note

    def _same_operands(self, traced: Statement, place: int, operands: Sequence[Ref]) -> tuple[Ref, ...]:
        """The operands of a traced statement, if it reads the same locals as ours; () where it does not."""
        found: list[Ref] = []
        for ref in traced.operands:
            value = self._graph.read[place].get(ref.text) if ref.kind is RefKind.LOCAL else None
            if value is not None:
                name = self._names.get((value.node, value.dims, value.shape))
                ref = Ref(RefKind.LOCAL, name) if name is not None else ref
            found.append(ref)
        ours = sorted(ref.text for ref in operands if ref.kind is RefKind.LOCAL)
        theirs = sorted(ref.text for ref in found if ref.kind is RefKind.LOCAL)
        return tuple(found) if ours == theirs else ()

    # Nodes

    def _linear(self, value: Value, hard: bool) -> tuple[str, Value]:
        node = value.node
        if not isinstance(node, Linear) or (node.site is None and not self._is_mixed(node)):
            return self._whole(value)
        if node.bias is not None and node.unbiased in self._shared:
            return self._sum_with_bias(node, value)
        if self._stands(node, value):
            return self._whole(value)
        made = self._rows(node, value)
        lead = translated(made.dims[:-1], node.rows)
        if lead is None:
            raise CannotEmitError
        k = merged(node.k)
        k_size = self._total(node.k)
        x = self._input(node, Value(node.x, (*lead, k), (*made.shape[:-1], k_size)))
        n_size = made.shape[-1]
        weight = weight_text(Value(node.weight, (merged(node.weight_n), merged(node.weight_k)), (n_size, k_size)))
        if weight is None:
            raise CannotEmitError
        text, flipped = weight
        of_weight = "{1}.t()" if flipped else "{1}"
        operands = [Ref(RefKind.LOCAL, x), Ref(RefKind.ATTRIBUTE, text)]
        bias = None
        if node.bias is not None:
            vector = weight_text(node.bias)
            if vector is None:
                raise CannotEmitError
            operands.append(Ref(RefKind.ATTRIBUTE, vector[0]))
            bias = "{2}"
        call = None if node.site is None else SiteCall(node.site, "{0}", of_weight, bias, "{0}")
        parts = ", ".join(filter(None, ("{0}", of_weight, bias)))
        op = WEIGHTED if call is None else node.kind
        return self._emit(op, f"{_F}.linear({parts})", operands, made, call)

    def _is_mixed(self, node: Linear) -> bool:
        """True for a product of the embeddings of a mixing layer, along these."""
        straight = self._straight.get(node.x)
        return straight is not None and merged(node.k) == straight.dims[1]

    def _stands(self, node: Linear, value: Value) -> bool:
        """True for weighted sums W @ x of the embeddings of a mixing layer, where they are traced in this layout."""
        place, straight = self._holder(value), self._straight.get(node.x)
        if place is None or place in self._graph.opaque or straight is None or node.kind != "linear":
            return False
        step, read = self._statements[place], self._graph.read[place]
        sites = step.call is not None and step.call.site == node.site and step.template in _PRODUCTS
        return sites and node.bias is None and list(read.values()) == [straight]

    def _input(self, node: Linear, wanted: Value) -> str:
        """What a product multiplies: for a mixing layer, a view of its embeddings as (samples, embeddings, dimension)."""
        straight = self._straight.get(node.x)
        if straight is None or not self._is_mixed(node):
            return self._tensor(wanted, hard=True)
        self._tensor(straight, hard=True)
        key = (wanted.node, wanted.dims, wanted.shape)
        if key not in self._turned:
            self._turned[key] = self._viewed(straight, wanted)
        return self._turned[key]

    def _sum_with_bias(self, node: Linear, value: Value) -> tuple[str, Value]:
        """A product that something else reads, too, and the sum with its bias."""
        made = self._rows(node, value)
        bias = None if node.bias is None else weight_text(node.bias)
        if node.unbiased is None or bias is None:
            raise CannotEmitError
        product = self._tensor(Value(node.unbiased, made.dims, made.shape), hard=True)
        operands = (Ref(RefKind.LOCAL, product), Ref(RefKind.ATTRIBUTE, bias[0]))
        return self._emit("add", _PLAIN["add"], operands, made)

    def _rows(self, node: Linear, value: Value) -> Value:
        """The layout of a product: rows of all columns, with the dimensions that the forward has where that fits."""
        def fits(each: Value) -> bool:
            n = node.shape[-1]
            if not all(each.dims[:-1]):  # of one element, or broadcast
                return False
            last = each.dims[-1:] == (merged([Piece(n, (1,) * len(n))]),) and each.shape[-1:] == (n,)
            return last and regrouped([p for d in rows_of(node.shape) for p in d], each.shape) == each.dims

        shown = [self._graph.made[place] for place in self._graph.holders.get(node, [])]
        candidates = [value, *(each for each in shown if each is not None)]
        straight = self._straight.get(node.x)
        if straight is not None and self._is_mixed(node):
            shape = (straight.shape[0], straight.shape[2], node.shape[-1])
            dims = regrouped([piece for dim in rows_of(node.shape) for piece in dim], shape)
            candidates += [] if dims is None else [Value(node, dims, shape)]
        return next((each for each in candidates if fits(each)), Value(node, rows_of(node.shape), node.shape))

    def _total(self, pieces: Sequence[Piece]) -> Size:
        return size_of(tuple(pieces), len(pieces[0].size))

    def _product(self, value: Value, hard: bool) -> tuple[str, Value]:
        node = value.node
        if not isinstance(node, Product):
            raise CannotEmitError
        made = Value(node, rows_of(node.shape), node.shape)
        of_left = (translated((made.dims[0],), node.batch[0]), translated((made.dims[1],), node.rows))
        of_right = (translated((made.dims[0],), node.batch[1]), translated((made.dims[2],), node.columns))
        if None in of_left or None in of_right:
            raise CannotEmitError
        k = self._total(node.k[0])
        batch, rows, columns = node.shape
        left_dims = (*(of_left[0] or ()), *(of_left[1] or ()), merged(node.k[0]))
        right_dims = (*(of_right[0] or ()), merged(node.k[1]), *(of_right[1] or ()))
        left = self._tensor(Value(node.left, left_dims, (batch, rows, k)), hard=True)
        right = self._tensor(Value(node.right, right_dims, (batch, k, columns)), hard=True)
        operands = (Ref(RefKind.LOCAL, left), Ref(RefKind.LOCAL, right))
        return self._emit("matmul", "torch.matmul({0}, {1})", operands, made)

    def _preferred(self, value: Value, hard: bool) -> Value:
        """The layout of a sum or product: that of the product with a weight in it, unless another is needed."""
        node: Node = value.node
        if hard:
            return value
        while isinstance(node, Pair | Activation):
            if isinstance(node, Activation):
                node = node.x
                continue
            inner = [each for each in node.operands if each.node.shape == node.shape and not is_weight(each.node)]
            same = [each.node for each in inner if all(s.stride == s.other for s in each.steps)]
            node = next((each for each in same if isinstance(each, Linear | Pair | Activation)), Source(shape=(), place=0))
        if not isinstance(node, Linear):
            return value
        found = self._rows(node, Value(node, value.dims, value.shape))
        return Value(value.node, found.dims, found.shape)

    def _pair(self, value: Value, hard: bool) -> tuple[str, Value]:
        node, made = value.node, self._preferred(value, hard)
        if not isinstance(node, Pair):
            raise CannotEmitError
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
                text = weight_text(given)
                if text is None:
                    return self._whole(value)
                operands[number] = Ref(RefKind.ATTRIBUTE, f"{text[0]}.t()" if text[1] else text[0])
            else:
                operands[number] = Ref(RefKind.LOCAL, self._tensor(given, hard=True))
        return self._emit(node.op, _PLAIN[node.op], (operands[0], operands[1]), made)

    def _is_of_gemm(self, node: Node) -> bool:
        """True for a product with a weight, and for a sum, product, norm or activation of one."""
        if node not in self._of_gemm:
            inner = node.operands if isinstance(node, Pair) else ()
            of_x = isinstance(node, Norm | Activation) and self._is_of_gemm(node.x)
            of_pair = any(self._is_of_gemm(each.node) for each in inner)
            self._of_gemm[node] = isinstance(node, Linear) or of_x or of_pair
        return self._of_gemm[node]

    def _activation(self, value: Value, hard: bool) -> tuple[str, Value]:
        node, made = value.node, self._preferred(value, hard)
        if not isinstance(node, Activation):
            raise CannotEmitError
        x = self._tensor(Value(node.x, made.dims, made.shape), hard=True)
        return self._emit(node.name, f"{_F}.{node.name}({{0}})", (Ref(RefKind.LOCAL, x),), made)

    def _norm(self, value: Value, hard: bool) -> tuple[str, Value]:
        node = value.node
        if not isinstance(node, Norm):
            raise CannotEmitError
        made = self._normed(node, value)
        if self._blocks(node) is not None:  # rows first, of which blocks are a view
            self._tensor(self._preferred(Value(node.x, (), ()), hard=False), hard=True)
        x = self._tensor(Value(node.x, made.dims, made.shape), hard=True)
        operands = [Ref(RefKind.LOCAL, x)]
        texts: list[str] = []
        for vector in (node.weight, node.bias):
            text = None if vector is None else weight_text(vector)
            if vector is not None and text is None:
                raise CannotEmitError
            if text is not None:
                operands.append(Ref(RefKind.ATTRIBUTE, text[0]))
            texts.append("None" if text is None else f"{{{len(operands) - 1}}}")
        given = texts if node.kind == "layer_norm" else texts[:1]
        width = made.shape[-1][0]
        text_of = f"{_F}.{node.kind}({{0}}, ({width},), {', '.join(given)}, {node.eps!r})"
        return self._emit(node.kind, text_of, operands, made)

    def _normed(self, node: Norm, value: Value) -> Value:
        """The layout of a norm: what it is over is the last dimension."""
        along = merged(node.over)
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
            lead = [pair for pair in pairs if pair[0] and not set(pair[0]) <= set(node.over)]
            if merged(piece for pair in pairs if pair[0] and pair not in lead for piece in pair[0]) != along:
                continue
            # The samples come first, then what is outer in the value.
            lead.sort(key=lambda pair: (not is_fixed(pair[1]), pair[0][0].stride), reverse=True)
            dims, shape = tuple(pair[0] for pair in lead), tuple(pair[1] for pair in lead)
            return Value(node, (*dims, along), (*shape, self._total(node.over)))
        raise CannotEmitError

    def _blocks(self, node: Norm) -> Value | None:
        """The layout of a norm over blocks of the columns of a product: (rows, blocks, columns of a block)."""
        whole = self._preferred(Value(node.x, (), ()), hard=False)
        if not whole.dims or len(node.over) != 1:
            return None
        (block,), n = node.over, whole.shape[-1]
        count = over(n, block.size)
        one = (1,) * len(n)
        if count is None or count == one or whole.dims[-1] != (Piece(n, one),) or block.stride != one:
            return None
        dims = (*whole.dims[:-1], (Piece(count, block.size),), (block,))
        return Value(node, dims, (*whole.shape[:-1], count, block.size))

    def _concatenation(self, value: Value, hard: bool) -> tuple[str, Value]:
        node = value.node
        if not isinstance(node, Concatenation):
            raise CannotEmitError
        natural = rows_of(node.shape)
        order = [natural.index(dim) for dim in value.dims if dim in natural and dim]
        if sorted(order) == list(range(len(natural))) and len(value.dims) == len(natural):
            return self._side_by_side(node, value, order) or self._whole(value)
        return self._in_rows(node, value) or self._side_by_side(node, Value(node, natural, node.shape)) or self._whole(value)

    def _side_by_side(
        self, node: Concatenation, made: Value, order: Sequence[int] | None = None
    ) -> tuple[str, Value] | None:
        """The concatenation of parts whose dimensions are in this order."""
        order = range(len(made.dims)) if order is None else order
        names: list[Ref] = []
        for part in node.parts:
            if is_weight(part.node):
                return None
            dims, shape = (tuple(each[place] for place in order) for each in (part.dims, part.shape))
            names.append(Ref(RefKind.LOCAL, self._tensor(Value(part.node, dims, shape), hard=True)))
        return self._joined(names, list(order).index(node.dim), made)

    def _in_rows(self, node: Concatenation, value: Value) -> tuple[str, Value] | None:
        """The concatenation of (samples, columns) as one of (samples, rows, columns of a row)."""
        if len(node.shape) != 2 or node.dim != 1 or len(value.shape) != 3 or value.shape[0] != node.shape[0]:
            return None
        if regrouped([piece for dim in rows_of(node.shape) for piece in dim], value.shape) != value.dims:
            return None
        names: list[Ref] = []
        for part in node.parts:
            rows = over(part.shape[1], value.shape[2])
            shape = None if rows is None else (part.shape[0], rows, value.shape[2])
            dims = None if shape is None else regrouped([piece for dim in part.dims for piece in dim], shape)
            if shape is None or dims is None or is_weight(part.node):
                return None
            names.append(Ref(RefKind.LOCAL, self._tensor(Value(part.node, dims, shape), hard=True)))
        return self._joined(names, 1, value)

    def _joined(self, names: Sequence[Ref], dim: int, made: Value) -> tuple[str, Value]:
        inside = ", ".join(f"{{{place}}}" for place in range(len(names)))
        return self._emit("cat", f"torch.cat([{inside}], {dim})", names, made)


def _argument(name: str, graph: Lowered) -> Value | None:
    return graph.arguments.get(name)


def _without_leading_ones(value: Value) -> Value:
    place = 0
    while place < len(value.dims) - 1 and not value.dims[place]:
        place += 1
    return Value(value.node, value.dims[place:], value.shape[place:])


def _printed(shape: Sequence[Size]) -> Shape:
    return tuple(size[0] if is_fixed(size) else None for size in shape)


def _is_canonical(traced: Statement, ours: Statement) -> bool:
    """True if a traced statement has the form of ours: it is what patterns match, in the model's own words."""
    if ours.op in _PLAIN:
        return traced.template == ours.template
    if ours.call is not None:
        call = traced.call
        plain = call is not None and call.x == "{0}" and call.out == "{0}" and call.plus is None
        return plain and ours.op != REASSOCIATED and call is not None and (call.bias is None) == (ours.call.bias is None)
    if ours.op in ("layer_norm", "rms_norm"):
        return parse_norm(traced) is not None
    if ours.op == "cat":
        return bool(concatenated(traced)) and concatenated(traced) == traced.operands
    if ours.op == "matmul":
        return traced.call is None and traced.op in ("matmul", "bmm", "einsum")
    return traced.op == ours.op and len(traced.operands) == 1


__all__ = ["CannotEmitError", "Emitted", "Other", "Parameter", "Part", "emitted"]
