"""From ATen operations to the canonical graph, statement by statement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from loka.graph.canonical.functions import Known, Pieces, known_function
from loka.graph.canonical.layout import Dims, Piece, Size, merged, rows_of, steps_along, total
from loka.graph.canonical.nodes import (
    Activation,
    Graph,
    Linear,
    Node,
    Norm,
    Other,
    Pair,
    Parameter,
    Part,
    Source,
    Value,
    reads_of,
)
from loka.graph.canonical.operations import SIZED, Operations
from loka.graph.canonical.products import Products, Unsupported, part_of
from loka.graph.canonical.recording import AtenCall, Run, tensors_in
from loka.graph.expression import Ref, RefKind
from loka.graph.ir import Statement
from loka.graph.sites.op_names import BOUNDARIES
from loka.graph.sites.weights import Index

_CUT = frozenset({"detach", "data"})  # what gradients do not go through


class Kind(IntEnum):
    """What numbers depend on, the least first."""

    FIXED = 0  # the model alone
    SIZE = 1  # the batch: a size of a tensor, or a product of such
    LIVE = 2  # an argument, or something else that may differ in each call


class Scalars:
    """The kinds of the locals that are numbers, or tuples and lists of these."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._kinds: dict[str, Kind] = {}
        self._tensors: set[str] = set()
        for name in runs[0].arguments:
            self._note(name, [run.arguments.get(name) for run in runs], Kind.LIVE)

    def read(self, step: Statement) -> Kind:
        """The last kind of the numbers that a statement reads, besides those in its text."""
        return max((self._of(ref.text) for ref in step.operands), default=Kind.FIXED)

    def made(self, step: Statement, values: Sequence[object]) -> None:
        """Note what a statement makes, in each run."""
        numbers = all(map(_is_number, values))
        self._note(step.target, values, self._kind(step, values) if numbers else Kind.LIVE)

    def _note(self, name: str, values: Sequence[object], kind: Kind) -> None:
        self._kinds.pop(name, None)
        self._tensors.discard(name)
        if isinstance(values[0], Tensor):
            self._tensors.add(name)
        elif all(map(_is_number, values)):
            self._kinds[name] = kind

    def _of(self, text: str) -> Kind:
        return self._kinds.get(text, Kind.FIXED)

    def _kind(self, step: Statement, values: Sequence[object]) -> Kind:
        read = self.read(step)
        same = all(value == values[0] for value in values)
        if not any(ref.text in self._kinds for ref in step.operands):
            of_tensors = all(self._is_tensor(ref) for ref in step.operands)  # their sizes
            return (Kind.FIXED if same else Kind.SIZE) if of_tensors else Kind.LIVE
        if read is not Kind.SIZE:
            return read
        if step.op == "getitem":
            return Kind.FIXED if same else Kind.SIZE
        return Kind.SIZE if step.op == "mul" else Kind.LIVE

    def _is_tensor(self, ref: Ref) -> bool:
        return ref.kind is not RefKind.LOCAL or ref.text in self._tensors  # other attributes are part of the text


def _is_number(value: object) -> bool:
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_is_number, value))
    return isinstance(value, bool | int | float | complex)


@dataclass(slots=True)
class Lowered:
    """The graph of a forward. Places are those of its statements."""

    arguments: dict[str, Value]  # those of the forward that are tensors
    read: list[dict[str, Value]]  # by place, the tensors that the statement reads, by name
    made: list[Value | None]  # by place, the tensor that it makes; None for something else
    opaque: set[int] = field(default_factory=set)  # statements that are taken as they are
    effects: set[int] = field(default_factory=set)  # of these, the ones with effects, which keep their order
    plain: set[int] = field(default_factory=set)  # places of statements that make no tensor: a dtype, a size
    contiguous: set[int] = field(default_factory=set)  # statements that make a contiguous tensor
    casts: dict[Node, Value] = field(default_factory=dict)  # of casts that are taken as they are, what they cast
    holders: dict[Node, list[int]] = field(default_factory=dict)  # places of statements that make a tensor of a node
    weights: dict[Node, str] = field(default_factory=dict)  # of sites, with the sites
    readers: dict[str, set[int]] = field(default_factory=dict)  # places of the statements that read a name
    targets: list[str] = field(default_factory=list)  # by place

    def read_once(self, node: Node) -> bool:
        """True for a node that one statement reads at most, besides what makes a view or a copy of another node.

        What reads its dtype or its size alone does not count.
        """
        places = self.holders.get(node, [])
        read: set[int] = set().union(*(self.readers.get(self.targets[place], set()) for place in places))
        read -= self.plain - self.effects
        made = {place: self.made[place] for place in read if place < len(self.made)}
        views = {place for place, value in made.items() if value is not None and self.holders[value.node][0] != place}
        return len(read - views) <= 1


def lowered(
    statements: Sequence[Statement],
    runs: Sequence[Run],
    names: Mapping[str, str],
    sites: Mapping[str, tuple[str, Index]],
    as_written: frozenset[str] = frozenset(),
) -> Lowered:
    """The graph of a forward from its runs.

    `names` are the expressions of Parameters and buffers by name; `sites` has the Parameter of each site and the index
    of the matrix in it. `as_written` are the targets of statements that stay as they are.
    """
    return _Lowering(statements, runs, names, sites, as_written).all()


class _Lowering:
    def __init__(
        self,
        statements: Sequence[Statement],
        runs: Sequence[Run],
        names: Mapping[str, str],
        sites: Mapping[str, tuple[str, Index]],
        as_written: frozenset[str],
    ) -> None:
        self._statements, self._runs, self._as_written = statements, runs, as_written
        self._sites = frozenset(sites)
        self._graph = Graph()
        self._values: dict[int, Value] = {}  # by the id of a tensor of the first run
        self._shapes: dict[int, tuple[Size, ...]] = {}
        self._found = Lowered({}, [], [])
        products = Products(self._graph, len(runs))
        self._operations = Operations(self._graph, products, self._values, self._shapes, len(runs), self._site_of)
        self._locals: dict[str, object] = {}
        self._scalars = Scalars(runs)
        self._calls: dict[int, AtenCall] = {}  # by the id of the tensor that a call made
        self._alive: list[object] = []
        for name, tensor in runs[0].tensors.items():
            shape = self._noted(tensor, [run.tensors[name] for run in runs])
            if name in names:
                node = self._graph.one(Parameter(shape=shape, place=-1, name=names[name]))
                self._values.setdefault(id(tensor), Value(node, rows_of(shape), shape))
        for site, (name, index) in sites.items():
            if name in names:
                self._found.weights.setdefault(self._part(self._values[id(runs[0].tensors[name])], index), site)
        for name in runs[0].arguments:
            given = [run.arguments.get(name) for run in runs]
            self._take(given, -1)
            self._locals[name] = given[0]
            if isinstance(given[0], Tensor):
                self._found.arguments[name] = self._values[id(given[0])]
        for place, step in enumerate(statements):
            self._found.targets.append(step.target)
            for ref in step.operands:
                self._found.readers.setdefault(ref.text, set()).add(place)

    def _part(self, value: Value, index: Index) -> Node:
        """The node of the part of a Parameter at an index."""
        for place in index:
            value = part_of(value, 0, place, 1, True, self._graph, -1)
        return value.node

    def _site_of(self, weight: Node, step: Statement) -> str | None:
        """The site of a product with a weight; linears that share a Parameter are told by the child that calls."""
        site = self._found.weights.get(weight)
        return step.note if site is not None and step.note in self._sites else site

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
        if self._has_effects(step, calls) or step.target in self._as_written:
            self._take_as_is(place, made, step)
        elif step.op in _CUT or not self._is_of_the_model(step, calls):
            self._take_as_is(place, made, step, pure=True)
        else:
            before = dict(self._values)
            try:
                for each in calls:
                    self._call(each, step, place)
            except Unsupported:
                self._values.clear()
                self._values.update(before)
                self._take_as_is(place, made, step, pure=True)
        self._scalars.made(step, made)
        result = made[0]
        self._locals[step.target] = result
        self._alive += made
        value = self._values.get(id(result)) if isinstance(result, Tensor) else None
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            self._found.plain.add(place)
        if isinstance(result, Tensor) and value is None:
            self._take(made, place)
            self._found.opaque.add(place)
            value = self._values[id(result)]
        if value is not None and place not in self._found.opaque:
            value = self._recognised(result, value, place)
            if _hides(value.node, place):
                del self._values[id(result)]
                self._take_as_is(place, made, step, pure=True)
                value = self._values[id(result)]
        self._found.made.append(value)
        if isinstance(result, Tensor) and result.layout == torch.strided and result.is_contiguous():
            self._found.contiguous.add(place)
        if value is not None:
            self._found.holders.setdefault(value.node, []).append(place)

    def _has_effects(self, step: Statement, calls: Sequence[tuple[AtenCall, ...]]) -> bool:
        if step.op == "module" or (step.target == "_" and not calls):
            return True
        if step.op in BOUNDARIES and self._scalars.read(step) is Kind.LIVE:
            return True  # a dropout that draws nothing yet
        return any(torch.Tag.nondeterministic_seeded in each[0].function.tags for each in calls)

    def _is_of_the_model(self, step: Statement, calls: Sequence[tuple[AtenCall, ...]]) -> bool:
        """False for a statement that computes with numbers that may differ in each call; views have them as sizes."""
        kind = self._scalars.read(step)
        sized = all(each[0].name in SIZED or _same_numbers(each) for each in calls)
        return kind is Kind.FIXED or (kind is Kind.SIZE and sized)

    def _take_as_is(self, place: int, made: Sequence[object], step: Statement, pure: bool = False) -> None:
        """Takes what a statement makes as tensors of their own."""
        self._found.opaque.add(place)
        if not pure and step.target not in self._as_written:
            self._found.effects.add(place)
        self._take(made, place)
        if step.target in self._as_written:
            self._note_cast(step, made[0], self._found.read[place])

    def _note_cast(self, step: Statement, cast: object, read: Mapping[str, Value]) -> None:
        """What a cast reads, where it casts under autocast alone."""
        name = step.operands[0].text
        source = self._locals.get(name)
        if name in read and isinstance(source, Tensor) and isinstance(cast, Tensor) and source.dtype == cast.dtype:
            self._found.casts[self._values[id(cast)].node] = read[name]

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

    def _call(self, calls: tuple[AtenCall, ...], step: Statement, place: int) -> None:
        """Notes what one operation makes."""
        call = calls[0]
        for tensors in zip(*(each.made for each in calls), strict=True):
            self._alive += tensors
            self._noted(tensors[0], tensors)
        if isinstance(call.result, Tensor):
            self._calls[id(call.result)] = call
            self._values[id(call.result)] = self._operations.result(call, step, place)
            return
        for value, tensor in self._operations.parts(call, place) or ((None, tensor) for tensor in call.made):
            self._calls[id(tensor)] = call
            self._values[id(tensor)] = value or self._operations.other(tensor, place)

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
            dims, shape = tuple(x.dims[dim] for dim in found.over), tuple(x.shape[dim] for dim in found.over)
            # In the order of the elements of x, whichever order the dimensions have.
            over = tuple(Piece(step.size, step.stride) for step in steps_along(dims, dims, shape) or ())
            vectors = [None if each is None else _vector(each, dims, shape) for each in (found.weight, found.bias)]
            made = Norm(
                shape=x.node.shape, place=place, kind=found.name, x=x.node, over=over, eps=found.eps,
                weight=vectors[0], bias=vectors[1],
            )  # fmt: skip
            return self._graph.one(made)
        return self._graph.one(
            Activation(shape=x.node.shape, place=place, name=found.name, x=x.node, constants=found.constants)
        )


def _hides(node: Node, place: int) -> bool:
    """True if a node reads what was made inside of its own statement, and only a statement can make."""
    inside = [each for each in reads_of(node) if each.place == place]
    return any(_needs_its_statement(each) or _hides(each, place) for each in inside)


def _needs_its_statement(node: Node) -> bool:
    return isinstance(node, Other | Source | Part) or (isinstance(node, Linear) and node.site is None)


def _same_numbers(calls: Sequence[AtenCall]) -> bool:
    """True if the numbers among the arguments of an operation, which tensors do not have, are the same in all runs."""
    numbers = [
        [each for each in tree_leaves((call.args, call.kwargs)) if not isinstance(each, Tensor)] for call in calls
    ]
    return all(each == numbers[0] for each in numbers)


def _vector(weight: Value, dims: Dims, shape: tuple[Size, ...]) -> Value | None:
    """A weight as a vector along the elements of these dimensions."""
    steps = steps_along(dims, weight.dims, shape) or ()
    size = total((step.size for step in steps), len(shape[0]))
    return Value(weight.node, (merged(Piece(step.size, step.other) for step in steps),), (size,))
