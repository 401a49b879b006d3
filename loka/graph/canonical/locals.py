"""The locals of a canonical forward: tensors in the layouts in which something reads them, and traced statements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from loka.graph.canonical.layout import (
    Size,
    is_fixed,
    move,
    size_of,
)
from loka.graph.canonical.lowering import Lowered, embeddings_of
from loka.graph.canonical.nodes import (
    Activation,
    Linear,
    Node,
    Norm,
    Pair,
    Product,
    Value,
)
from loka.graph.canonical.views import CannotEmitError, permuted, reshaped
from loka.graph.expression import Arg, Call, Ref, RefKind, local, method
from loka.graph.ir import Shape, SiteCall, Statement


def paired(op: str, left: Arg, right: Arg) -> Call:
    """A sum ("add") or a product ("mul") of two tensors."""
    return Call(f"operator.{op}", (left, right))


@dataclass(slots=True)
class Emitted:
    """The statements of a forward in canonical form, and the shapes of their targets."""

    statements: list[Statement] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)


class Locals(ABC):
    """The locals of a canonical forward, made when something reads them: which tensor stands under which name."""

    def __init__(self, statements: Sequence[Statement], arguments: Sequence[str], graph: Lowered) -> None:
        self._statements, self._graph = statements, graph
        self._places = {step.target: place for place, step in enumerate(statements) if step.target != "_"}
        self._taken = {*self._places, *arguments}
        self._shared: frozenset[Node] = frozenset()
        self._returned: dict[Value, str] = {}  # names of results
        self._straight = embeddings_of(graph)
        self._made = Emitted()
        self._names: dict[Value, str] = {}
        self._first: dict[Node, Value] = {}  # the layout in which a node was made
        self._turned: dict[Value, str] = {}  # views of embeddings that products read
        self._of_gemm: dict[Node, bool] = {}
        self._scattered: set[str] = set()  # locals that are permuted views
        self._traced: dict[int, str] = {}
        self._sources = {value.node: name for name in arguments if (value := graph.arguments.get(name)) is not None}

    # Statements as they were traced

    def _as_traced(self, place: int) -> str:
        """The local that a statement makes, with the statement as it was traced."""
        if place in self._traced:
            return self._traced[place]
        step = self._statements[place]
        self._check_change(place)
        read = {ref: self._operand(ref, place) for ref in step.operands}
        value = self._graph.made[place]
        name = step.target
        self._add(step.reads(read.__getitem__), value)
        self._traced[place] = name
        if value is not None:
            self._names.setdefault(value, name)
            self._first.setdefault(value.node, value)
        return name

    def _check_change(self, place: int) -> None:
        """Raises CannotEmitError for a statement that changes what others read as it was: they may stand after it."""
        node, reads = self._graph.changes.get(place), enumerate(self._graph.read)
        others = (read for other, read in reads if other != place and self._graph.made[other] is not None)
        if node is not None and any(each.node is node for read in others for each in read.values()):
            raise CannotEmitError

    def _operand(self, ref: Ref, place: int) -> Ref:
        if ref.kind is not RefKind.LOCAL:
            return ref
        value = self._graph.read[place].get(ref.text)
        return local(self._value(ref.text) if value is None else self._tensor(value))

    def _value(self, name: str) -> str:
        """A local that is no tensor: an argument, a size, a tuple of tensors."""
        place = self._places.get(name)
        return name if place is None else self._as_traced(place)

    # Tensors

    def _tensor(self, value: Value, any_strides: bool = False) -> str:
        """A local with the elements of a value in its layout; `any_strides`: strides do not matter to what reads it."""
        if value not in self._names:
            if value.node not in self._first:
                self._make(value)
            if value not in self._names:
                self._names[value] = self._viewed(self._first[value.node], value, any_strides)
        name = self._names[value]
        if any_strides or name not in self._scattered or not self._was_contiguous(value):
            return name
        self._names[value] = self._fresh(name)
        self._add(Statement(self._names[value], "contiguous", method(local(name), "contiguous")), value)
        return self._names[value]

    def _was_contiguous(self, value: Value) -> bool:
        """True for a tensor that was contiguous as traced: what is not looked into may rely on it."""
        places = self._graph.holders.get(value.node, [])
        return any(place in self._graph.contiguous and self._graph.made[place] == value for place in places)

    def _viewed(self, first: Value, wanted: Value, any_strides: bool = True) -> str:
        """A tensor in another layout."""
        if any(size_of(dim, len(size)) != size for dim, size in zip(wanted.dims, wanted.shape, strict=True)):
            return self._broadcast(first, wanted)
        step = move(first.dims, wanted.dims, first.shape, wanted.shape)
        if step is None:
            raise CannotEmitError
        name, shape = self._names[first], first.shape
        holder = self._holder(wanted)
        tensor = local(name)
        views: list[tuple[Call, tuple[Size, ...]]] = []
        if step.before is not None:
            views.append((reshaped(tensor, shape, step.before), step.before))
            shape = step.before
        if step.order is not None:
            moved = tuple(shape[place] for place in step.order)
            views.append((permuted(tensor, step.order), moved))
            shape = moved
        if step.after is not None:
            views.append((reshaped(tensor, shape, step.after), step.after))
        for number, (view, made) in enumerate(views):
            last = number == len(views) - 1
            shown = replace(view, args=(local(name), *view.args[1:]))
            target = self._target(wanted, name) if last else self._fresh(f"{name}_view")
            note = self._statements[holder].note if holder is not None else ""
            if last and step.order is not None and step.after is None:
                if not any_strides and self._was_contiguous(wanted):
                    shown = method(shown, "contiguous")
                else:
                    self._scattered.add(target)
            self._made.statements.append(Statement(target, view.target.removeprefix("."), shown, note=note))
            self._made.shapes[target] = _printed(made)
            name = target
        return name

    def _broadcast(self, first: Value, wanted: Value) -> str:
        """A tensor with dimensions of one where it is broadcast."""
        shape = tuple(size if dim else (1,) * len(size) for dim, size in zip(wanted.dims, wanted.shape, strict=True))
        return self._tensor(Value(wanted.node, wanted.dims, shape), any_strides=True)

    def _make(self, value: Value) -> None:
        """Makes a node, in the wanted layout where it can be had; dimensions of one element are a view of it."""
        pairs = [pair for pair in zip(value.dims, value.shape, strict=True) if pair[0]]
        traced = self._holder(value) is not None and not self._is_of_gemm(value.node)
        if isinstance(value.node, Pair | Activation) and 0 < len(pairs) < len(value.dims) and not traced:
            value = Value(value.node, tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
        made = self._of_kind(value)
        self._first[value.node] = made[1]
        self._names[made[1]] = made[0]

    @abstractmethod
    def _of_kind(self, value: Value) -> tuple[str, Value]:
        """Makes a node: the local, and the layout that it has."""

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
        returned = self._returned.get(value)
        if returned is not None and returned not in self._made.shapes:
            return returned
        place = self._holder(value)
        if place is None:
            places = self._graph.holders.get(value.node, [])
            return self._fresh(f"{self._statements[places[0]].target if places else otherwise}_rows")
        name = self._statements[place].target
        used = name in self._made.shapes or name == "_"
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

    def _emit(self, op: str, called: Call, value: Value, call: SiteCall | None = None) -> tuple[str, Value]:
        """A canonical statement."""
        target = self._target(value, op)
        self._add(Statement(target, op, called, call, self._note(value, self._holder(value))), value)
        return target, value

    def _note(self, value: Value, place: int | None) -> str:
        places = self._graph.holders.get(value.node, []) if place is None else [place]
        step = self._statements[places[0] if places else max(value.node.place, 0)]
        of_child = step.call is not None and step.call.site == step.note and isinstance(value.node, Product)
        return step.note.rpartition(".")[0] if of_child else step.note

    def _is_of_gemm(self, node: Node) -> bool:
        """True for a product with a weight, and for a sum, product, norm or activation of one."""
        if node not in self._of_gemm:
            inner = node.operands if isinstance(node, Pair) else ()
            of_x = isinstance(node, Norm | Activation) and self._is_of_gemm(node.x)
            of_pair = any(self._is_of_gemm(each.node) for each in inner)
            self._of_gemm[node] = isinstance(node, Linear) or of_x or of_pair
        return self._of_gemm[node]


def _printed(shape: Sequence[Size]) -> Shape:
    return tuple(size[0] if is_fixed(size) else None for size in shape)
