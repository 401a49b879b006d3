"""A module's forward as torch reads it, with what `Reader` needs to know about each node.

Nodes have in `meta`: `example_value`; `stack`, the modules whose forwards they are in, relative to the captured one; of
products, norms and activations `place`; and `transformed` if a transform of torch.func is active. A tensor that is
changed in place stays one value.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from loka.graph.capture.arguments import bound_arguments
from loka.graph.capture.captured import CannotCaptureError, Captured
from loka.graph.capture.dynamo import capture
from loka.graph.capture.sources import Source
from loka.graph.sites.groups import split_groups
from loka.graph.sites.op_names import op_name
from loka.graph.sites.products.catalogue import has_place
from loka.graph.sites.sizes import Sizes, Symbols
from loka.model.callables import is_library_file
from loka.model.inputs import empty_like, order_of_strides, rebuild, tensors_in

_FRAME = re.compile(r'File "(.*?)", line (\d+), in ')
_FIXED = re.compile(r"\S+ == (\d+)")  # a condition that leaves one size of an input
_PLAIN = (bool, int, float, complex, str, bytes, type, type(None), torch.dtype, torch.device, torch.Size)
_OWN_BACKWARD = "it is inside a torch.autograd.Function, whose backward is its own"


Shape = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """The line of the model's code that calls a function, and the reason if no call in it can be patched."""

    file: str = ""
    line: int = 0
    opaque: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ModuleCall:
    """A call of a module, in one run of the model."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    gradients: bool  # torch.is_grad_enabled()
    result: Any = None  # what it returned; None where nothing was run

    @property
    def description(self) -> Any:
        """What is equal for calls of alike modules that return alike tensors."""
        return description((self.args, dict(self.kwargs))), self.gradients

    def arguments(self, module: nn.Module) -> dict[str, Any]:
        """The arguments by the names of the forward's signature."""
        bound = bound_arguments(module, self.args, dict(self.kwargs))
        held = {**dict(zip(bound.names, bound.args, strict=False)), **bound.kwargs}
        return held | {bound.rest: bound.args[len(bound.names) :], bound.keywords: bound.kwargs}


def description(value: Any, submodule: bool = True, shapes: Mapping[int, Shape] = MappingProxyType({})) -> Any:
    """What is equal for modules, and for arguments, with which torch reads the same graph.

    `shapes` are those of some tensors, by id, with None for symbols.
    """
    if isinstance(value, Tensor):
        layout = order_of_strides(value) if id(value) in shapes else value.stride()
        shape = shapes.get(id(value), tuple(value.shape))
        return shape, layout, value.dtype, value.device, value.requires_grad, value.is_leaf
    if isinstance(value, nn.Module) and submodule:
        held = ((key, description(each, key == "_modules", shapes)) for key, each in vars(value).items())
        return type(value), tuple(held)
    if isinstance(value, dict):
        return type(value), tuple((key, description(each, submodule, shapes)) for key, each in value.items())
    if type(value) in (list, tuple, set):
        return type(value), tuple(description(each, submodule, shapes) for each in value)
    return (type(value), value) if isinstance(value, _PLAIN) else (type(value), id(value))


def descriptions(calls: Sequence[ModuleCall], exact: bool) -> Any:
    """The descriptions of calls, one in each run; unless `exact`, sizes that differ between runs are symbols."""
    shapes = dict[int, Shape]()
    tensors = () if exact else zip(*(tensors_in((call.args, dict(call.kwargs))) for call in calls), strict=False)
    for alike in tensors:
        sizes = zip(*(tensor.shape for tensor in alike), strict=False)
        shape = tuple(at[0] if len(set(at)) == 1 else None for at in sizes)
        shapes |= {id(tensor): shape for tensor in alike}
    return exact, *((description((call.args, dict(call.kwargs)), True, shapes), call.gradients) for call in calls)


@dataclass(frozen=True, slots=True, eq=False)
class CapturedForward:
    """The graph of a module's forward, with symbols for the sizes that differ between runs."""

    read: Captured
    outputs: tuple[Any, ...]  # values that it returns, as nodes have them
    called: frozenset[str]  # modules whose forward runs, relative to this one
    asks_for_mode: bool
    asks_for_sizes: bool  # of its arguments, so that it may be another at other ones

    @property
    def symbolic_sizes(self) -> Iterator[Any]:
        """The sizes of all its tensors that are no numbers."""
        for node in self.read.graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, Tensor):
                yield from (size for size in value.shape if not isinstance(size, int))

    def symbols(self, held: Sequence[Mapping[str, Any]]) -> dict[Any, Sizes]:
        """What the symbols of its arguments' sizes are in each run, whose arguments are `held`."""
        found = dict[Any, Sizes]()
        for node, source in self.read.sources.items():
            value = node.meta.get("example_value")
            sizes: tuple[Any, ...] = tuple(value.shape) if isinstance(value, Tensor) else (value,)
            for dimension, size in enumerate(sizes):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr not in found:
                    given = [held_at(each.get(source.root), source.steps) for each in held]
                    found[size.node.expr] = tuple(g.shape[dimension] if isinstance(g, Tensor) else g for g in given)
        return found


def captured_forward(
    module: nn.Module,
    calls: Sequence[ModuleCall],
    example: int,
    fakes: FakeTensorMode | None,
    leaves: Mapping[str, tuple[Any, Any]] = MappingProxyType({}),
) -> CapturedForward:
    """The forward in a module's mode, for a call in each run, of which one is the example.

    Sizes that differ between runs are symbols. `fakes` is the mode of a fake module's tensors, `leaves` are children
    that are not read, each with what it returned in the example's and in another run. Raises CannotCaptureError.
    """
    if inspect.isgeneratorfunction(module.forward) or inspect.iscoroutinefunction(module.forward):
        raise CannotCaptureError("it computes nothing until what it returns is run")
    args, kwargs, marked = _example(calls, example, fakes)
    with torch.set_grad_enabled(calls[0].gradients):
        read = split_groups(
            capture(module, args, kwargs, leaves=leaves, observed=leaves, symbolic=False, hooks=True), module
        )
    found = (_FIXED.fullmatch(condition.text) for condition in read.conditions)
    fixed = [each[0] for each in found if each is not None and int(each[1]) in marked]
    if fixed:
        raise CannotCaptureError(f"the forward fixes its batch size: {fixed[0]}")
    ids = {str(id(child)): name for name, child in module.named_modules()}
    called = set[str]()
    _describe(read.graph, read.constants, ids, called, opaque=None)
    outputs = next(iter(read.graph.find_nodes(op="output"))).args[0]
    values = tuple(each.meta.get("example_value") for each in outputs if isinstance(each, fx.Node))
    asks = any(_asks_for_mode(each.source, module) for each in read.reads)
    of_sizes = any(_FIXED.fullmatch(condition.text) is None for condition in read.conditions)
    return CapturedForward(read, values, frozenset(called), asks, of_sizes)


def held_at(held: Any, steps: Iterable[tuple[str, Any]]) -> Any:
    """What some steps lead to; None where there is nothing."""
    try:
        for kind, key in steps:
            held = getattr(held, key) if kind == "." else held[key]
    except (AttributeError, KeyError, IndexError, TypeError):
        return None
    return held


def with_values(
    forward: CapturedForward, symbols: Symbols, module: nn.Module, held: Sequence[Mapping[str, Any]]
) -> Symbols:
    """Also the symbols of sizes that come from values, which are seen where its graph runs on real samples."""
    if all(size.node.expr.free_symbols <= symbols.keys() for size in forward.symbolic_sizes):
        return symbols
    seen: list[dict[Any, int]] = []
    for each in held:
        run = _SeenSizes(fx.GraphModule(dict(forward.read.constants), forward.read.graph))
        sources = forward.read.sources.values()
        with torch.no_grad():
            run.run(*(held_at(module if s.is_of_module else each.get(s.root), s.steps) for s in sources))
        seen.append(run.seen)
    return {each: tuple(run[each] for run in seen) for each in seen[0]}


class _SeenSizes(fx.Interpreter):
    """Runs a graph, and keeps what the symbols of its sizes are."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seen: dict[Any, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        made, known = super().run_node(n), n.meta.get("example_value")
        sizes = zip(known.shape, made.shape, strict=True) if isinstance(known, Tensor) else ((known, made),)
        for size, there in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                self.seen[size.node.expr] = int(there)
        return made


def _asks_for_mode(source: Source, module: nn.Module) -> bool:
    """True for the `training` of a module that is not torch's own."""
    if source.steps[-1:] != ((".", "training"),) or not source.is_of_module:
        return False
    return not type(held_at(module, source.steps[:-1])).__module__.startswith("torch.nn.")


def _example(
    calls: Sequence[ModuleCall], example: int, fakes: FakeTensorMode | None
) -> tuple[tuple[Any, ...], dict[str, Any], set[int]]:
    """Arguments without values, with sizes that differ between runs marked for symbols, and these of the example."""
    shapes = [[tensor.shape for tensor in tensors_in((call.args, call.kwargs))] for call in calls]
    forms = [tuple(map(len, each)) for each in shapes]
    if any(form != forms[0] for form in forms):
        raise CannotCaptureError("it is given other tensors at other batch sizes")
    of_each, marked = iter(list(zip(*shapes, strict=True))), set[int]()

    def visit(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return rebuild(part, visit)
        sizes = next(of_each)
        if part.layout != torch.strided:
            return part
        with nullcontext() if fakes is None else fakes:
            made = empty_like(part, tuple(part.shape))
            made = made if part.grad_fn is None else made.clone()  # a leaf may not be changed in place
        for dimension, at in enumerate(zip(*sizes, strict=True)):
            if len(set(at)) > 1:
                torch._dynamo.mark_dynamic(made, dimension)
                marked.add(at[example])
        return made

    args, kwargs = visit((calls[example].args, dict(calls[example].kwargs)))
    return args, kwargs, marked


def _describe(graph: fx.Graph, held: Mapping[str, Any], ids: Mapping[str, str], ran: set[str], opaque: Any) -> None:
    """Writes owners, places and the bodies of checkpoints and autograd functions into a graph's nodes."""
    transforms = 0
    for node in graph.nodes:
        if node.op == "get_attr" and isinstance(body := held.get(str(node.target)), fx.GraphModule):
            node.meta["body"] = body.graph
            inside = _OWN_BACKWARD if str(node.target).startswith("fwd_body") else opaque
            if not str(node.target).startswith("bwd_body"):
                _describe(body.graph, vars(body)["_modules"], ids, ran, inside)
        if not node.op.startswith("call"):
            continue
        stack = [ids[key] for each in node.meta.get("nn_module_stack", ()) if (key := each.partition("@")[0]) in ids]
        ran.update(stack)
        node.meta["stack"] = stack
        func = called(node)[0]
        name = op_name(func) if callable(func) else ""
        transforms += name.endswith("increment_nesting") - name.endswith("decrement_nesting")
        if transforms:
            node.meta["transformed"] = True
        if has_place(func):
            node.meta["place"] = _place(node.stack_trace or "", opaque)


def called(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function that a node calls, and its arguments."""
    args, kwargs = tuple(node.args), dict(node.kwargs)
    if node.op == "call_method":
        return getattr(Tensor, str(node.target), node.target), args, kwargs
    if node.target is getattr:
        return getattr(Tensor, str(args[1])).__get__, args[:1], {}
    return node.target, args, kwargs


def _place(trace: str, opaque: str | None) -> Place:
    """The innermost frame of the model's own code."""
    frames = [(file, int(line)) for file, line in _FRAME.findall(trace) if not is_library_file(file)]
    return Place(*frames[-1], opaque) if frames else Place(opaque=opaque)
