"""Merging the captures of a forward into one list of operations."""

from __future__ import annotations

import dataclasses
import inspect
import operator
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from loka.graph.capture.captured import Captured, line_of, map_tree, modules_around, place_in
from loka.graph.capture.sources import Source
from loka.graph.ir import CannotTraceError
from loka.graph.trace.alignment import aligned, operations, placeholder_value
from loka.graph.trace.conditions import bound_arguments, dotted
from loka.graph.trace.examples import ExampleCall
from loka.graph.trace.printer import TrainingFlag, constant
from loka.graph.trace.situations import Seen

IN_PLACE = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}  # fmt: skip
_METHODS = {operator.iadd: "add_", operator.isub: "sub_", operator.imul: "mul_", operator.itruediv: "div_"}
_CONTEXTS: dict[Any, str] = {
    torch._C._set_grad_enabled: "with torch.enable_grad()",
    torch.amp.autocast_mode._enter_autocast: "with torch.autocast(...)",
    torch.amp.autocast_mode._exit_autocast: "with torch.autocast(...)",
}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LIMITS = ("min", "max", "eps", "tiny")


@dataclass(frozen=True, slots=True)
class Op:
    """One operation; `args` and `kwargs` hold fx nodes, constants and `TrainingFlag`."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    child: str  # the inlined child whose forward it is part of, "" for the owner's own
    line: tuple[str, int] | None = None  # file and line in the user's code


class OwnerPaths:
    """The module whose forward is read: the first names of its children, and which of them are inlined."""

    def __init__(self, module: nn.Module, expand: Collection[str]) -> None:
        self.module = module
        self.names: dict[int, str] = {}
        for name, child in module.named_modules():
            self.names.setdefault(id(child), name)
        self.inside = {"", *(self.names[id(module.get_submodule(path))] for path in expand)}

    def child_at(self, lines: Sequence[tuple[str, int]]) -> str | None:
        """The first of the inlined children of the class in whose forward the innermost of some lines stands."""
        for line in reversed(lines):
            for path in sorted(self.inside):
                if _is_in(line, type(self.module.get_submodule(path)).forward):
                    return path
        return None


def _is_in(line: tuple[str, int], function: Callable[..., Any]) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and line in {(code.co_filename, number) for *_, number in code.co_lines()}


class Merged:
    """The operations of several captures that are alike: constants that move become what has their values.

    The first has the casts that do nothing in others. `flags` are the paths of modules whose mode is read. `lost` says
    what moves and is nothing that could be printed.
    """

    def __init__(
        self,
        paths: OwnerPaths,
        call: ExampleCall,
        seen: Sequence[Seen],
        flags: Sequence[str],
    ) -> None:
        self._paths, self._captures = paths, [each.captured for each in seen]
        self._flags = {path: tuple(each.situation.mode(path) for each in seen) for path in flags}
        self.lost: list[str] = []
        self.ops: list[Op] = []
        self._graph = fx.Graph()
        self._arguments = {name: self._graph.placeholder(name) for name in bound_arguments(paths.module, call)}
        self.ops += [Op(node, (), {}, "") for node in self._arguments.values()]
        self._held: dict[str, fx.Node] = {}  # by path, what the module holds
        self._found: dict[Any, fx.Node] = {}  # by source, what a way from an argument or an attribute leads to
        self._nodes: dict[fx.Node, fx.Node] = {}  # by the first capture's node
        self._dtypes: list[tuple[fx.Node, tuple[torch.dtype, ...]]] = []  # of the tensors so far, in all captures
        self._of_line: dict[
            Any, fx.Node
        ] = {}  # whose dtype a line of the user's reads: `x @ w.to(x.dtype) + b.to(x.dtype)`
        self._child = ""
        self._line: tuple[str, int] | None = None
        first = self._captures[0]
        rows = [aligned(first, each) or {} for each in self._captures]
        self._rows = {node: tuple(row[node] for row in rows) for node in operations(first.graph)}
        for node, row in self._rows.items():
            self._operation(node, row)
        self._result(first)

    def _operation(self, node: fx.Node, row: tuple[fx.Node, ...]) -> None:
        self._child = next((path for path in reversed(modules_around(node)) if path in self._paths.inside), "")
        self._line = line_of(node)
        own = [each if (each.op, each.target) == (node.op, node.target) else node for each in row]
        args = self._merged([each.args for each in own])
        kwargs = self._merged([dict(each.kwargs) for each in own])
        if node.target is operator.setitem:
            where = f" {place_in(*self._line)}" if self._line is not None else ""
            raise CannotTraceError(f"assignment into a tensor{where}")
        kind, target = node.op, node.target
        if target in _METHODS and isinstance(_value(node.args[0]), torch.Tensor):
            kind, target = "call_method", _METHODS[target]
        elif target in IN_PLACE:
            target = IN_PLACE[target]
        args, kwargs = _named(target, args, kwargs)
        if target in _CONTEXTS:
            inside = next((line for each in _after(node) if (line := line_of(each)) is not None), None)
            words = "with torch.no_grad()" if args == (False,) else _CONTEXTS[target]
            raise CannotTraceError(f"enters '{words}' {place_in(*inside) if inside is not None else ''}".rstrip())
        made = self._add(kind, target, args, kwargs, row)
        self._nodes[node] = made

    def _add(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], row: Sequence[fx.Node] = ()
    ) -> fx.Node:
        made = self._graph.create_node(kind, target, _without_flags(args), _without_flags(kwargs))
        self.ops.append(Op(made, args, kwargs, self._child, self._line))
        values = [each.meta.get("example_value") for each in row]
        made.meta["is_tensor"] = not row or any(isinstance(each, torch.Tensor) for each in tree_leaves(values[0]))
        self._note(made, values)
        return made

    def _note(self, node: fx.Node, values: Sequence[Any]) -> None:
        """The dtypes of a tensor in all captures."""
        dtypes = [each.dtype for each in values if isinstance(each, torch.Tensor)]
        if dtypes and len(dtypes) == len(values):
            self._dtypes.append((node, tuple(dtypes)))

    def _merged(self, values: Sequence[Any]) -> Any:
        """An argument of an operation, from what it is in all captures."""
        first = values[0]
        if isinstance(first, fx.Node):
            return self._of(first)
        if isinstance(first, tuple | list) and not isinstance(first, torch.Size):
            items = [self._merged(each) for each in zip(*values, strict=True)]
            return items if isinstance(first, list) else tuple(items)
        if isinstance(first, dict):
            return {key: self._merged([each[key] for each in values]) for key in first}
        if isinstance(first, slice):
            ends = ([getattr(each, end) for each in values] for end in ("start", "stop", "step"))
            return slice(*map(self._merged, ends))
        if isinstance(first, torch.device):
            return self._device(first)
        if all(type(each) is type(first) and (each == first or repr(each) == repr(first)) for each in values):
            return first
        return self._moving(tuple(values))

    def _moving(self, values: tuple[Any, ...]) -> Any:
        """A constant that moves: a flag, a dtype or a limit of one."""
        if isinstance(values[0], bool):
            paths = [path for path, pattern in self._flags.items() if pattern == values]
            if self._child in paths:
                return TrainingFlag()
            if paths:
                return self._attribute(
                    Source("self", tuple((".", key) for key in f"{paths[0]}.training".lstrip(".").split(".")), "")
                )
        if isinstance(values[0], torch.dtype):
            node = self._of_line.get((self._line, values)) or self._argument_of(values)
            node = node or next((each for each, dtypes in reversed(self._dtypes) if dtypes == values), None)
            if node is not None:
                self._of_line[self._line, values] = node
                return self._add("call_function", getattr, (node, "dtype"), {})
        if isinstance(values[0], float):
            for node, dtypes in reversed(self._dtypes):
                limit = next((name for name in LIMITS if _limits(name, dtypes) == values), None)
                if limit is not None:
                    dtype = self._add("call_function", getattr, (node, "dtype"), {})
                    info = self._add("call_function", torch.finfo, (dtype,), {})
                    return self._add("call_function", getattr, (info, limit), {})
        where = f" {place_in(*self._line)}" if self._line is not None else ""
        self.lost.append(f"{values[0]!r}{where}")
        return values[0]

    def _argument_of(self, dtypes: tuple[torch.dtype, ...]) -> fx.Node | None:
        """The argument with some dtypes; None where there is none."""
        for node, source in self._captures[0].sources.items():
            if source.root in self._arguments and isinstance(node.meta.get("example_value"), torch.Tensor):
                given = [placeholder_value(each, source) for each in self._captures]
                if all(isinstance(x, torch.Tensor) and x.dtype == y for x, y in zip(given, dtypes, strict=True)):
                    return self._of(node)
        return None

    def _device(self, device: torch.device) -> fx.Node | torch.device:
        """The device of the arguments: a model is planned and trained on two machines."""
        for captured in self._captures[:1]:
            for node, source in captured.sources.items():
                value = node.meta.get("example_value")
                if (
                    source.root
                    and not source.is_of_module
                    and isinstance(value, torch.Tensor)
                    and value.device == device
                ):
                    return self._add("call_function", getattr, (self._of(node), "device"), {})
        return device

    def _of(self, node: fx.Node) -> fx.Node:
        """The node of one of the first capture; of a placeholder, what leads to it."""
        if node not in self._nodes:
            source = self._captures[0].sources.get(node)
            if source is None or node.op == "get_attr":
                raise CannotTraceError("the forward makes a constant tensor, which would be frozen at its first value")
            if not source.root:
                raise CannotTraceError(f"reads {_outside(source.text)}, which is neither an argument nor of the module")
            found = self._attribute(source) if source.is_of_module else self._argument(source)
            self._nodes[node] = found
            values = [placeholder_value(each, source) for each in self._captures]
            self._note(found, values)
        return self._nodes[node]

    def _attribute(self, source: Source) -> fx.Node:
        names = dotted(source.steps)
        path = ".".join(names)
        if path not in self._held:
            self._held[path] = self._graph.get_attr(path)
            self.ops.append(Op(self._held[path], (), {}, self._child))
        return self._way(self._held[path], source.steps[len(names) :], ("self", path))

    def _argument(self, source: Source) -> fx.Node:
        return self._way(self._arguments[source.root], source.steps, (source.root,))

    def _way(self, node: fx.Node, steps: Sequence[tuple[str, Any]], key: tuple[Any, ...]) -> fx.Node:
        """What steps lead to from a node."""
        if len(steps) == 2 and steps[0] == (".", "shape"):
            steps = [("size", steps[1][1])]
        for kind, name in steps:
            key = (*key, (kind, name))
            if key not in self._found:
                if kind == "size":
                    self._found[key] = self._add("call_method", "size", (node, name), {})
                else:
                    function = operator.getitem if kind == "[]" else getattr
                    self._found[key] = self._add("call_function", function, (node, name), {})
                self._found[key].meta["is_tensor"] = False
            node = self._found[key]
        return node

    def _result(self, first: Captured) -> None:
        output = next(node for node in first.graph.nodes if node.op == "output")
        known = {id(node): node for node in first.graph.nodes}

        def leaf(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return self._of(known[id(value)])
            if isinstance(value, Source):
                return self._argument(value)
            constant(value)  # raises for what cannot be printed
            return value

        own = _class_of_users(first.result)
        if own is not None:
            raise CannotTraceError(f"returns a {own.__qualname__}, which generated code cannot make; a dict it can")
        made = map_tree(first.result, leaf)
        self._child, self._line = "", line_of(output)
        node = self._graph.output(None)
        self.ops.append(Op(node, (made,), {}, ""))


def _class_of_users(result: Any) -> type | None:
    """The class of a NamedTuple or dataclass in a result; None where there is none."""
    if isinstance(result, Source):
        return None
    if dataclasses.is_dataclass(result) or hasattr(result, "_fields"):
        return type(result)
    inner = result.values() if isinstance(result, dict) else result if isinstance(result, list | tuple) else ()
    return next((found for each in inner if (found := _class_of_users(each)) is not None), None)


def _limits(name: str, dtypes: Sequence[torch.dtype]) -> tuple[float, ...] | None:
    """The limits of floating-point dtypes by one name; None where one is no such dtype."""
    return (
        tuple(getattr(torch.finfo(each), name) for each in dtypes) if all(d.is_floating_point for d in dtypes) else None
    )


def _value(operand: Any) -> Any:
    """The fake value of a node; a constant itself."""
    return operand.meta["example_value"] if isinstance(operand, fx.Node) else operand


def _outside(text: str) -> str:
    text = re.sub(r"G\['__import_\w+'\]\.", "the global ", text)  # of another file
    return re.sub(r"G\['(\w+)'\]", r"the global \1", text)


def _without_flags(value: Any) -> Any:
    """Arguments for a node of fx, which knows no flags."""
    return fx.node.map_aggregate(value, lambda each: True if isinstance(each, TrainingFlag) else each)


def _named(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a function of torch.nn.functional with names for the plain values at their end: `inplace=False`."""
    if getattr(target, "__module__", "") != torch.nn.functional.__name__ or not inspect.isfunction(target):
        return args, kwargs
    last = max((place for place, each in enumerate(args) if isinstance(each, fx.Node | tuple | list)), default=0)
    names = list(inspect.signature(target).parameters)
    return args[: last + 1], {**dict(zip(names[last + 1 :], args[last + 1 :], strict=False)), **kwargs}


def _after(node: fx.Node) -> Iterator[fx.Node]:
    while node.next.op != "root":
        node = node.next
        yield node
