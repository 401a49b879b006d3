"""Values that traced operations have in the known calls of a module."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from loka.graph.trace.examples import ExampleCall, copy_tree
from loka.graph.trace.printer import INFIX, PREFIX

Values = tuple[Any, ...]  # of one operation, one for each call

SIZE_ATTRIBUTES = frozenset({"shape", "ndim"})
SIZE_METHODS = frozenset({"size", "dim", "numel", "nelement", "ndimension"})
_LOOKUPS = frozenset({"get", "keys", "values", "items"})  # methods of a dictionary that change nothing
_LOOKING = frozenset({getattr, operator.getitem, *INFIX, *PREFIX})


class ValuesNeededError(Exception):
    """Tracing reached a decision that depends on a computed value, which the trace does not have."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        """`node` of `graph` is the value; its name is the same in every trace of the module."""
        super().__init__(node.name)
        self.graph, self.node = graph, node


def computed_values(module: nn.Module, needed: ValuesNeededError, calls: Sequence[ExampleCall]) -> Values:
    """The value in each call.

    Runs the operations traced so far on `module`, which may change its buffers. Their exceptions are passed on.
    """
    before = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in needed.graph.nodes:
        copies[node] = before.node_copy(node, copies.__getitem__)
    before.output(copies[needed.node])
    run = fx.Interpreter(module, graph=before).run
    names = [str(node.target) for node in before.nodes if node.op == "placeholder"]
    found = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for call in calls:
            given = bound_arguments(module, call)
            found.append(run(*(given[name] for name in names), enable_io_processing=False))
    return tuple(found)


def bound_arguments(module: nn.Module, call: ExampleCall) -> Mapping[str, Any]:
    """Copies of a call's arguments, with defaults, by name."""
    given = inspect.signature(module.forward).bind(*copy_tree(call.args), **copy_tree(call.kwargs))
    given.apply_defaults()
    return given.arguments


class EntryValues:
    """Values that can be read where a forward starts: arguments, parts of them, attributes, and sizes."""

    def __init__(self, module: nn.Module, calls: Sequence[ExampleCall]) -> None:
        self._module, self._calls = module, calls
        # While the module is traced, these attributes are traced values.
        self._floats = {
            f"{path}.{name}".lstrip("."): value
            for path, child in module.named_modules()
            for name, value in vars(child).items()
            if isinstance(value, float)
        }
        self._arguments: tuple[Mapping[str, Any], ...] | None = None  # bound when they are first needed
        self._found: dict[fx.Node, Values | None] = {}

    def of(self, node: fx.Node) -> Values | None:
        """The node's value in each call; None where it is computed, or cannot be read in one of the calls."""
        if node not in self._found:
            try:
                self._found[node] = self._read(node)
            except Exception:  # noqa: BLE001 - classes of the user's own can raise anything when they are read
                self._found[node] = None
        return self._found[node]

    def _read(self, node: fx.Node) -> Values | None:
        if node.op == "placeholder":
            if self._arguments is None:
                self._arguments = tuple(bound_arguments(self._module, call) for call in self._calls)
            return tuple(given[str(node.target)] for given in self._arguments)
        if node.op == "get_attr":
            return (self._attribute(str(node.target)),) * len(self._calls)
        function = _reading(node)
        inputs = [self.of(each) for each in node.all_input_nodes]
        if function is None or any(each is None for each in inputs):
            return None
        found = []
        for call in range(len(self._calls)):
            values = {each: known[call] for each, known in zip(node.all_input_nodes, inputs, strict=True) if known}
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            if _computes(node, args) or _may_run_code(node, args):
                return None
            found.append(function(*args, **kwargs))
        return tuple(found)

    def _attribute(self, path: str) -> torch.Tensor | float:
        if path in self._floats:
            return self._floats[path]
        holder, _, name = path.rpartition(".")
        module = self._module.get_submodule(holder)
        found = module._parameters.get(name, module._buffers.get(name))
        if found is None:
            raise AttributeError(path)
        return found


def _reading(node: fx.Node) -> Callable[..., Any] | None:
    """The node's operation, if it only looks things up or computes with sizes."""
    if node.op == "call_method" and node.target in SIZE_METHODS | _LOOKUPS:
        return _method(str(node.target))
    if node.op == "call_function" and callable(node.target) and node.target in _LOOKING:
        return node.target
    return None


def _method(name: str) -> Callable[..., Any]:
    return lambda owner, *args, **kwargs: getattr(owner, name)(*args, **kwargs)


def _may_run_code(node: fx.Node, args: Sequence[Any]) -> bool:
    """True for an item or entry of an object of the user's own, which its class may compute."""
    plain = isinstance(args[0], dict | list | tuple | str) if args else False
    return not plain and (node.target is operator.getitem or node.target in _LOOKUPS)


def _computes(node: fx.Node, args: Sequence[Any]) -> bool:
    """True if the operation computes with a tensor's numbers, or reads more of a tensor than its sizes."""
    if not any(isinstance(arg, torch.Tensor) for arg in args):
        return False
    if node.target is getattr:
        return args[1] not in SIZE_ATTRIBUTES
    if node.op == "call_method":
        return node.target not in SIZE_METHODS
    return node.target not in (operator.eq, operator.ne) or args[1] is not None


def is_size(node: fx.Node) -> bool:
    """True for a tensor's shape, its number of dimensions or elements, and parts of its shape."""
    if node.op == "call_method":
        return node.target in SIZE_METHODS
    if node.op != "call_function" or len(node.args) < 2:
        return False
    base = node.args[0]
    if node.target is operator.getitem:
        return isinstance(base, fx.Node) and is_size(base)
    return node.target is getattr and node.args[1] in SIZE_ATTRIBUTES


VIEWS_OF_DICT = ("keys", "values", "items")
Length = int | tuple[str | int, ...] | None


class LoopError(Exception):
    """Tracing reached a loop over a traced value, whose length the trace does not have."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        """`node` of `graph` is iterated over; it is the latest traced node, or an earlier one."""
        super().__init__(node.name)
        self.graph, self.node = graph, node

    @property
    def place(self) -> int:
        """Identifies the loop: the number of operations before it, the same in every trace of the module."""
        return len(self.graph.nodes)


def dict_of(node: fx.Node) -> fx.Node:
    """The dict whose keys, values or items a node is; the node itself if it is nothing of that."""
    of_dict = node.op == "call_method" and node.target in VIEWS_OF_DICT and len(node.args) == 1 and not node.kwargs
    return node.all_input_nodes[0] if of_dict else node


def length_of(module: nn.Module, loop: LoopError, calls: Sequence[ExampleCall]) -> Length:
    """Number of items of the loop in all calls, or the keys of the dict; None where they differ, or for other values.

    Runs the operations traced before the loop on `module`, which may change its buffers. Their exceptions are passed
    on.
    """
    before = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in loop.graph.nodes:
        copies[node] = before.node_copy(node, copies.__getitem__)
    before.output(copies[dict_of(loop.node)])
    run = fx.Interpreter(module, graph=before).run
    names = [str(node.target) for node in before.nodes if node.op == "placeholder"]
    lengths: set[Length] = set()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for call in calls:
            given = inspect.signature(module.forward).bind(*copy_tree(call.args), **copy_tree(call.kwargs))
            given.apply_defaults()
            found = run(*(given.arguments[name] for name in names), enable_io_processing=False)
            plain = isinstance(found, dict) and all(type(key) in (str, int) for key in found)
            countable = isinstance(found, tuple | list | Tensor) and dict_of(loop.node) is loop.node
            lengths.add(tuple(found) if plain else len(found) if countable else None)
    return lengths.pop() if len(lengths) == 1 else None
