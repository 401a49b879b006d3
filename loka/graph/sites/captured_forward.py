"""A whole model's forwards as torch reads them, with what `operations_of` needs to know about each node."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from loka.graph.capture.captured import Captured
from loka.graph.capture.dynamo import capture
from loka.graph.capture.sources import Source
from loka.graph.sites.forward import Forward, Origin, Place, called, names_of
from loka.graph.sites.op_names import op_name
from loka.graph.sites.products.catalogue import has_place
from loka.graph.sites.recording import empty_like, fake_copy
from loka.graph.sites.site import RowCount
from loka.graph.sites.sizes import Symbols
from loka.graph.sites.train_eval_diff import depends_on_mode
from loka.model.build_model import BuiltModel
from loka.model.callables import is_library_file
from loka.model.copying import copy_model
from loka.model.inputs import Shape, resized_inputs

_FRAME = re.compile(r'File "(.*?)", line (\d+), in ')
_FIXED = re.compile(r"\S+ == \d+")  # a condition that leaves one size of an input
_OWN_BACKWARD = "it is inside a torch.autograd.Function, whose backward is its own"


class NotAtAnyBatchError(ValueError):
    """The graph of a forward does not tell its sizes at any batch size, or what it returns."""


def captured_forwards(built: BuiltModel, batch: int) -> tuple[Forward, Forward]:
    """The forwards in training and evaluation with a symbol for the batch, which is `batch` in the example.

    Evaluation is not read apart where nothing but torch's own modules asks which of the two it is: these never add or
    drop a product. Raises CannotCaptureError where torch cannot read a forward, and NotAtAnyBatchError.
    """
    on_meta = any(t.is_meta for t in (*built.module.parameters(), *built.module.buffers()))
    fakes = FakeTensorMode(allow_non_fake_inputs=True) if on_meta else None
    modules = copy_model(built.module, lambda tensor: tensor) if fakes is None else fake_copy(built, fakes)
    if inspect.isgeneratorfunction(modules[""].forward) or inspect.iscoroutinefunction(modules[""].forward):
        raise NotAtAnyBatchError("it computes nothing until what it returns is run")
    args, kwargs = _marked_inputs(built, batch, fakes)

    def read_in(training: bool) -> tuple[Captured, Forward]:
        modules[""].train(training)
        with torch.set_grad_enabled(training):
            read = capture(modules[""], args, kwargs, symbolic=False, hooks=True)
        if any(_FIXED.fullmatch(condition.text) for condition in read.conditions):
            raise NotAtAnyBatchError(f"the forward fixes its batch size: {read.conditions[0].text}")
        return read, _forward(read, modules, batch)

    read, training = read_in(True)
    asks = depends_on_mode(modules) is not None or any(_asks_for_mode(each.source, modules[""]) for each in read.reads)
    return training, read_in(False)[1] if asks else training


def _asks_for_mode(source: Source, model: nn.Module) -> bool:
    """True for the `training` of a module that is not torch's own."""
    if source.steps[-1:] != ((".", "training"),):
        return False
    owner = _held_at(model, source.steps[:-1]) if source.is_of_module else None
    return not type(owner).__module__.startswith("torch.nn.")


def _marked_inputs(built: BuiltModel, batch: int, fakes: FakeTensorMode | None) -> tuple[Any, Any]:
    """Inputs without values, whose dimensions that follow the batch torch takes for symbols."""
    given, others = (built.args, built.kwargs), list[Shape]()

    def note(tensor: Tensor, shape: Shape) -> Tensor:
        others.append(shape)
        return tensor

    def example(tensor: Tensor, shape: Shape) -> Tensor:
        other = others.pop(0)
        if tensor.layout != torch.strided:
            return tensor
        with fakes or nullcontext():
            made = empty_like(tensor, shape)
        for dimension, (size, there) in enumerate(zip(shape, other, strict=True)):
            if size != there:
                torch._dynamo.mark_dynamic(made, dimension)
        return made

    resized_inputs(given, built.batch_size, batch + 1, note)
    args, kwargs = resized_inputs(given, built.batch_size, batch, example, stride=False)
    return args, kwargs


def _forward(read: Captured, modules: Mapping[str, nn.Module], batch: int) -> Forward:
    names: dict[int, Origin] = {}
    for tensor, origin in names_of(modules[""]):
        names.setdefault(id(tensor), origin)
    for node, source in read.sources.items():
        node.meta["origin"] = _origin(source, modules[""], names)
    ids = {str(id(module)): name for name, module in modules.items()}
    ran: set[str] = set()
    _describe(read.graph, read.constants, ids, ran, opaque=None)
    outputs = next(node for node in read.graph.nodes if node.op == "output").args[0]
    values = tuple(each.meta.get("example_value") for each in outputs if isinstance(each, fx.Node))
    if not values:
        raise NotAtAnyBatchError("it returns no tensor")
    return Forward(read.graph, values, frozenset(ran), _symbols(read.graph, batch))


def _origin(source: Source, model: nn.Module, names: Mapping[int, Origin]) -> Origin:
    if not source.is_of_module:
        return Origin(is_input=bool(source.root))
    return names.get(id(_held_at(model, source.steps)), Origin())


def _held_at(model: nn.Module, steps: Iterable[tuple[str, Any]]) -> Any:
    """What some steps lead to from a model; None where there is nothing."""
    held: Any = model
    try:
        for kind, key in steps:
            held = getattr(held, key) if kind == "." else held[key]
    except (AttributeError, KeyError, IndexError, TypeError):
        return None
    return held


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
        node.meta["caller"], node.meta["owner"] = ["", "", *stack][-2:]
        func = called(node)[0]
        name = op_name(func) if callable(func) else ""
        transforms += name.endswith("increment_nesting") - name.endswith("decrement_nesting")
        if transforms:
            node.meta["transformed"] = True
        if has_place(func):
            node.meta["place"] = _place(node.stack_trace or "", opaque)


def _place(trace: str, opaque: str | None) -> Place:
    """The innermost frame of the model's own code."""
    frames = [(file, int(line)) for file, line in _FRAME.findall(trace) if not is_library_file(file)]
    return Place(*frames[-1], opaque) if frames else Place(opaque=opaque)


def _symbols(graph: fx.Graph, batch: int) -> Symbols:
    """What the sizes of the inputs are at other batch sizes: multiples of the batch, and those plus one."""
    found = {}
    for node in graph.nodes:
        value = node.meta.get("example_value")
        sizes = value.shape if isinstance(value, Tensor) else (value,)
        for size in (each for each in sizes if isinstance(each, torch.SymInt)):
            expression = size.node.expr
            if node.op == "placeholder" and expression.is_Symbol:
                found[expression] = RowCount(*divmod(size.node.hint, batch))
            elif not expression.free_symbols <= found.keys():
                raise NotAtAnyBatchError(f"the size {expression} comes from values")
    return found
