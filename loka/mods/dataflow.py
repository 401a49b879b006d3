"""Data flow of a model that mods need, from the graphs of its forwards: `Adaptable`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from loka.graph.capture.captured import place_in
from loka.graph.sites.forwards import Forwards, forwards_of
from loka.graph.sites.operations import Call, FunctionCall, Operation, Operations, reached
from loka.model.build_model import BuiltModel

# Views that keep every row of a matrix, if its width is the same before and after.
_KEEPS_ROWS = frozenset(
    ("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "alias")
)
_BLOCKS = frozenset(("unflatten", "view", "reshape"))  # operations that split a row into blocks
_OF_TORCH = (nn.LayerNorm, nn.RMSNorm, nn.SiLU)
_NORMS = frozenset(("layer_norm", "rms_norm"))
_DEPTH = 6  # results of a norm of blocks and its views, and one more


@dataclass(frozen=True, slots=True)
class WrittenFunction:
    """A norm, activation or linear that a forward calls as a function: there is no module to replace."""

    op: str  # "silu", "sigmoid" (of x * sigmoid(norm(x))), "layer_norm", "rms_norm", "linear"
    owner: str  # qualified name of the module whose forward calls it
    place: str  # "models.py:44 'y = F.silu(x)'", "" if unknown


PLACES = 5  # of one function in one forward, listed in a reason


@dataclass(frozen=True, slots=True)
class Adaptable:
    """A model to adapt. It may be on the meta device, as only its structure is read.

    All fields but `module` are of its forwards on example inputs (`analyse_dataflow`). Names stay valid
    while mods change modules of the model, so that a mod can find work in the result of another.
    """

    module: nn.Module
    final: frozenset[str]  # linears whose product reaches an output without another product after it
    into: Mapping[str, str]  # linear -> the linear that is the only reader of its product, with nothing in between
    called: frozenset[str] = frozenset()  # modules whose forward ran
    read: Mapping[str, str] = field(default_factory=dict)  # Parameter -> another reader than its own linear: "mul"
    swishes: frozenset[str] = frozenset()  # nn.Sigmoids whose result only multiplies their or their norm's input
    written: tuple[WrittenFunction, ...] = ()

    def calls(self, wants: Callable[[str], bool], *ops: str) -> Iterator[tuple[str, str, str]]:
        """The functions of `ops` that the wanted forwards call, each forward and function once.

        Yields function, owner and place: ("silu", "body", " at models.py:44, models.py:57"); the place is "" if
        unknown.
        """
        places: dict[tuple[str, str], list[str]] = {}
        for each in self.written:
            if each.op in ops and wants(each.owner):
                places.setdefault((each.op, each.owner), []).extend([each.place] if each.place else [])
        for (op, owner), found in places.items():
            yield op, owner, f" at {_listed(found)}" if found else ""


def _listed(places: Sequence[str]) -> str:
    """Text of places: a single one with its source line, several without."""
    if len(places) == 1:
        return places[0]
    lines = list(dict.fromkeys(place.partition(" '")[0] for place in places))
    return ", ".join(lines[:PLACES]) + (f" and {len(lines) - PLACES} more" if len(lines) > PLACES else "")


def analyse_dataflow(built: BuiltModel, forwards: Forwards | None = None) -> Adaptable:
    """The data flow of a model. The model, its buffers, its hooks and the random state are unchanged.

    `forwards` are those of the model, where they are known. Raises InputError where the forward raises on the example
    inputs, both as fake tensors and as real samples.
    """
    modules = dict(built.module.named_modules())
    forwards = forwards_of(built) if forwards is None else forwards
    linears = [_Linears(mode, modules) for mode in forwards.modes]
    final = frozenset(name for found in linears for name in found.final())
    per_mode = [found.into() for found in linears]
    into = {name: to for name, to in per_mode[0].items() if all(found.get(name) == to for found in per_mode)}
    swishes, written = _functions(forwards.modes[0], modules)
    return Adaptable(built.module, final, into, forwards.called, _read(forwards.modes, modules), swishes, written)


class _Linears:
    """The linears of one run, by name, with the graph around them."""

    def __init__(self, mode: Operations, modules: Mapping[str, nn.Module]) -> None:
        self._modules, self._outputs = modules, mode.outputs
        self._calls: dict[str, list[Call]] = {}
        self._of: dict[Operation, Call] = {}
        for call in mode.calls:
            name = _linear_of(call, modules)
            if name is not None:
                self._calls.setdefault(name, []).append(call)
            self._of[call.result] = call

    def final(self) -> Iterator[str]:
        """Linears whose product reaches an output without another product after it, or reaches no other product.

        The latter because a forward may write a product into its output in ways that the graph does not show.
        """
        last = set(_products_before(self._outputs))
        multiplied = _multiplied(call.result for calls in self._calls.values() for call in calls)
        for name, calls in self._calls.items():
            if any(call.result in last or call.result not in multiplied for call in calls):
                yield name

    def into(self) -> dict[str, str]:
        """For each linear whose product has a single reader that is a linear, this linear; both are called once."""
        outputs = set(self._outputs)
        found = {}
        for name, calls in self._calls.items():
            if len(calls) != 1:
                continue
            seen, readers = _read_as_rows(calls[0].result)
            other = self._of.get(readers[0]) if len(readers) == 1 else None
            to = None if other is None else _linear_of(other, self._modules)
            if other is None or to is None or len(self._calls[to]) != 1 or outputs & seen or other.source not in seen:
                continue
            if calls[0].n == other.k:
                found[name] = to
        return found


def _linear_of(call: Call, modules: Mapping[str, nn.Module]) -> str | None:
    """The nn.Linear whose own product a call is, including subclasses with torch's forward."""
    if call.module is not None:
        return call.module if isinstance(modules.get(call.module), nn.Linear) else None
    own = call.result.op == "linear" and isinstance(modules.get(call.owner), nn.Linear)
    return call.owner if own else None


def _products_before(outputs: Iterable[Operation]) -> Iterator[Operation]:
    """The products that results come from, without another product in between."""
    return filter(_is_product, reached(outputs, lambda node: () if _is_product(node) else node.parents))


def _multiplied(results: Iterable[Operation]) -> set[Operation]:
    """Those of the results, and of everything computed from them, that go into a product, at any distance."""
    seen = reached(results, lambda node: node.children)
    read = {parent for node in seen if _is_product(node) for parent in node.parents}
    return reached(seen & read, lambda node: seen.intersection(node.parents))


def _is_product(node: Operation) -> bool:
    return node.gemm or node.op.startswith("conv")


def _read_as_rows(result: Operation) -> tuple[set[Operation], list[Operation]]:
    """A product with its views, and their readers; a view that may mix rows counts as a reader."""
    seen, readers = {result}, dict[Operation, None]()
    waiting = [result]
    while waiting:
        for child in waiting.pop().children:
            if child.op in _KEEPS_ROWS and len(child.parents) == 1:
                if child not in seen:
                    seen.add(child)
                    waiting.append(child)
            else:
                readers[child] = None
    return seen, list(readers)


def _read(modes: Iterable[Operations], modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """For each Parameter of an nn.Linear with a reader other than the linear's own product, this reader's operation."""
    found: dict[str, str] = {}
    for mode in modes:
        own = {call.result: _linear_of(call, modules) for call in mode.calls}
        for name, parameter in mode.parameters.items():
            owner = name.rpartition(".")[0]
            if isinstance(modules.get(owner), nn.Linear):
                other = next((child for child in parameter.children if own.get(child) != owner), None)
                if other is not None:
                    found.setdefault(name, other.op)
    return found


def _functions(
    training: Operations, modules: Mapping[str, nn.Module]
) -> tuple[frozenset[str], tuple[WrittenFunction, ...]]:
    """The nn.Sigmoids that are part of a Swish, and the functions without a module."""
    kinds: dict[str, set[bool]] = {}
    written: dict[WrittenFunction, None] = {}
    for call in training.functions:
        swish = call.op == "sigmoid" and _is_swish(call.result)
        module = modules.get(call.owner)
        if type(module) is nn.Sigmoid:
            kinds.setdefault(call.owner, set()).add(swish)
        elif not _has_module(call, module) and (call.op != "sigmoid" or swish):
            written[WrittenFunction(call.op, call.owner, _place(call))] = None
    for product in training.calls:
        if product.bias is not None and _linear_of(product, modules) is None:
            written[WrittenFunction("linear", product.owner, _place(product))] = None
    return frozenset(name for name, swish in kinds.items() if swish == {True}), tuple(written)


def _has_module(call: FunctionCall, module: nn.Module | None) -> bool:
    """True if a norm or activation is a module of torch, or a subclass, or a norm of blocks already."""
    if module is None or isinstance(module, _OF_TORCH):
        return module is not None
    of_blocks = call.op == "rms_norm" and bool(call.result.parents) and call.result.parents[0].op in _BLOCKS
    return of_blocks and not any(True for _ in (*module.parameters(), *module.buffers()))


def _place(call: FunctionCall | Call) -> str:
    return place_in(call.file, call.line).removeprefix("at ") if call.file else ""


def _is_swish(sigmoid: Operation) -> bool:
    """True if the only reader of a sigmoid multiplies it by the sigmoid's input or its norm's input."""
    (product, *others) = sigmoid.children or (None,)
    if product is None or others or product.op != "mul" or len(product.parents) != 2:
        return False
    (gated,) = [parent for parent in product.parents if parent is not sigmoid] or (None,)
    return gated is not None and gated in _taken(sigmoid)


def _taken(sigmoid: Operation) -> Iterator[Operation]:
    """The inputs of a sigmoid and of its norm: the results before it, through norms and views."""
    node = sigmoid
    for _ in range(_DEPTH):
        before = [parent for parent in node.parents if not parent.constant]
        if len(before) != 1:
            return
        node = before[0]
        yield node
        if not (node.view or node.op in _NORMS):
            return
