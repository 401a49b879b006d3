"""Reading a forward: captured in several situations, and merged into one list of operations.

A capture has constants where the forward reads what may change from call to call: flags, dtypes, float attributes. So
a forward is captured with these varied together, each in a pattern of its own, and a constant that moves is printed as
the expression that has its value in every capture. What moves otherwise is refused. Plain attributes that decide what
is computed are conditions of the call, as sizes are.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from loka.graph.capture.captured import (
    CannotCaptureError,
    Captured,
    Condition,
    Read,
    line_of,
    map_tree,
    modules_around,
    place_in,
)
from loka.graph.capture.dynamo import capture
from loka.graph.capture.sources import Source
from loka.graph.ir import CannotTraceError
from loka.graph.trace.examples import ExampleCall, copy_tree
from loka.graph.trace.fills import Fill, fills
from loka.graph.trace.out_of_place import MAKING, makes_its_result
from loka.graph.trace.printer import TrainingFlag, attribute, constant
from loka.sites.callables import message_of

_EPS = re.compile(r"(\w*_)?eps(ilon)?\d*")  # names of floats that norms are recognised by: conditions, not read live
_MANY = 4093  # times the difference between two example batches: as many rows as a model is trained on
_IN_PLACE = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}  # fmt: skip
_CONTEXTS: dict[Any, str] = {
    torch._C._set_grad_enabled: "with torch.enable_grad()",
    torch.amp.autocast_mode._enter_autocast: "with torch.autocast(...)",
    torch.amp.autocast_mode._exit_autocast: "with torch.autocast(...)",
}
_PLAIN = (bool, int, float, str, type(None), dict)  # types that conditions on values tell
_DECIDES = frozenset({"CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "BOOL_TRUE", "BOOL_FALSE", "NONE_MATCH"})


@dataclass(frozen=True, slots=True)
class Op:
    """One operation; `args` and `kwargs` hold fx nodes, constants and `TrainingFlag`."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    child: str  # the inlined child whose forward it is part of, "" for the owner's own
    line: tuple[str, int] | None = None  # file and line in the user's code


@dataclass(frozen=True, slots=True)
class Reading:
    """The operations of a whole forward. `called` are the inlined children."""

    ops: tuple[Op, ...]
    called: tuple[str, ...]
    floats: Mapping[str, bool]  # float attributes that it reads, by path; True for those that are in conditions
    conditions: tuple[str, ...]  # on the arguments and attributes, as Python, under which these are the operations


@dataclass(frozen=True, slots=True)
class _Situation:
    """What is varied in one capture. No two columns of `_SITUATIONS` are alike, so that each is told by its pattern."""

    training: bool
    gradients: bool
    autocast: torch.dtype | None = None
    narrow: bool = False  # floating-point arguments in that dtype, as inside of a model under autocast
    varied: bool = False  # floats at other values
    on: frozenset[str] | None = None  # modules in training, all others in evaluation

    def mode(self, path: str) -> bool:
        """Whether a module is in training."""
        return self.training if self.on is None else path in self.on


@dataclass(frozen=True, slots=True)
class _Seen:
    """A capture in a situation."""

    situation: _Situation
    captured: Captured


_SITUATIONS = (
    _Situation(training=True, gradients=True),
    _Situation(training=False, gradients=False, autocast=torch.bfloat16, varied=True),
    _Situation(training=True, gradients=False, autocast=torch.bfloat16, narrow=True),
    _Situation(training=False, gradients=True, autocast=torch.float16, narrow=True, varied=True),
)
_DIFFERENCES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("in training than in evaluation", {"training": False}),
    ("without gradients", {"gradients": False}),
    ("under autocast", {"autocast": torch.bfloat16}),
    ("on bfloat16 arguments", {"autocast": torch.bfloat16, "narrow": True}),
    ("on float16 arguments", {"autocast": torch.float16, "narrow": True}),
)


def read_forward(module: nn.Module, expand: Collection[str], calls: Sequence[ExampleCall]) -> Reading:
    """The operations of a module's forward, and of its children in `expand` (relative names).

    The module is left as it was. Raises CannotTraceError with the reason, and the user's line where there is one.
    """
    return _Reader(module, expand, calls).reading()


def other_situation(module: nn.Module, expand: Collection[str], calls: Sequence[ExampleCall]) -> str | None:
    """The mode or dtype in which a forward does other operations, in words, with the line; None where it does not."""
    reader = _Reader(module, expand, calls)
    with contextlib.suppress(CannotTraceError):
        return reader.difference(reader.first_seen().captured)
    return None


@dataclass(frozen=True, slots=True)
class _Float:
    """A float attribute that is read, with the value that it has where floats are varied."""

    source: Source
    value: float
    other: float


class _Reader:
    """Captures one module, and finds what is read of it."""

    def __init__(self, module: nn.Module, expand: Collection[str], calls: Sequence[ExampleCall]) -> None:
        self.module, self._calls, self.first = module, calls, calls[0]
        self.names: dict[int, str] = {}
        for name, child in module.named_modules():
            self.names.setdefault(id(child), name)
        self.inside = {"", *(self.names[id(module.get_submodule(path))] for path in expand)}
        self._observed: dict[str, tuple[Any, Any]] = {}
        self._leaves = tuple(dict.fromkeys(self._leaves_below("", module)))

    def _leaves_below(self, path: str, module: nn.Module) -> Iterator[str]:
        """The children that stay calls; lists of modules are looked into."""
        for name, child in module.named_children():
            below, own = f"{path}.{name}".lstrip("."), self.names[id(child)]
            if own in self.inside or isinstance(child, nn.ModuleList | nn.ModuleDict):
                yield from self._leaves_below(below, child)
            else:
                yield own

    def reading(self) -> Reading:
        """The merged captures."""
        seen = self.first_seen()
        _check_opaque(seen.captured)
        floats = tuple(self._floats(seen.captured))
        merged = self._merged(seen, floats)
        if floats and (merged is None or merged.lost):
            floats = tuple(each for each in floats if self._is_live(seen, each))
            merged = self._merged(seen, floats)
        if merged is None:
            raise CannotTraceError(self.difference(seen.captured) or "does other operations in another mode or dtype")
        if merged.lost:
            raise CannotTraceError(f"{merged.lost[0]} is not the same in each call")
        first = seen.captured
        conditions = self._conditions(first, merged.live)
        self._check_calls(conditions)
        return Reading(tuple(merged.ops), self._called(first), self._float_paths(first, merged.live), conditions)

    def first_seen(self) -> _Seen:
        """The capture in training, with gradients."""
        try:
            return self._seen(_SITUATIONS[0])
        except CannotTraceError:
            self._observe()
            return self._seen(_SITUATIONS[0])

    def _merged(self, first: _Seen, floats: Sequence[_Float]) -> _Merged | None:
        """The operations in all situations; None where they are not the same ones, but for casts that do nothing."""
        seen = [first, *(self._in_any_dtype(each, floats) for each in self._situations(first.captured, floats))]
        seen.sort(key=lambda each: -len(_operations(each.captured.graph)))
        whole = seen[0].captured
        if any(_rows(whole, each.captured) is None for each in seen):
            return None
        flags = self._flags(first.captured)
        for bit in range(
            max(len(flags) - 1, 0).bit_length()
        ):  # flags of several modules: told apart by a code for each
            on = frozenset(path for place, path in enumerate(flags) if place >> bit & 1)
            seen.append(self._seen(replace(_SITUATIONS[0], on=on)))
            if _rows(whole, seen[-1].captured) is None:
                raise CannotTraceError("does other operations where its modules are in different modes")
        return _Merged(self, seen, flags, floats)

    def _situations(self, first: Captured, floats: Sequence[_Float]) -> tuple[_Situation, ...]:
        """Those in which constants of a capture may move. That nothing else does is seen where both forwards run."""
        constants: list[Any] = []
        operations = _operations(first.graph)
        for node in operations:
            map_tree((node.args, dict(node.kwargs)), constants.append)
        if any(node.target in _IN_PLACE or node.target is operator.setitem for node in operations):
            return _SITUATIONS[1:]  # what is written into keeps its dtype, which others may not have
        limits = {getattr(torch.finfo(each), name) for each in _FLOATS for name in _LIMITS}
        if any(isinstance(each, torch.dtype) or (type(each) is float and each in limits) for each in constants):
            return _SITUATIONS[1:]
        moded = self._flags(first) and any(each is True for each in constants)  # all modules are in training there
        return (replace(_SITUATIONS[0], training=False, varied=True),) if floats or moded else ()

    def _in_any_dtype(self, situation: _Situation, floats: Sequence[_Float]) -> _Seen:
        """A situation as it is seen, or with what the module can run: some cannot under autocast, or on bfloat16."""
        tried = [situation] if situation.narrow else []
        tried += [replace(situation, narrow=False)] if situation.autocast is not None else []
        for each in tried:
            with contextlib.suppress(CannotTraceError):
                return self._seen(each, floats)
        return self._seen(replace(situation, autocast=None, narrow=False), floats)

    def _is_live(self, first: _Seen, each: _Float) -> bool:
        """True for a float that a capture has as it is: others are computed with, or decide what is done."""
        other = self._seen(replace(_SITUATIONS[0], varied=True), [each])
        if _rows(first.captured, other.captured) is None:
            return False
        return not _Merged(self, [first, other], [], [each]).lost

    def _seen(self, situation: _Situation, floats: Sequence[_Float] = ()) -> _Seen:
        given = inspect.signature(self.module.forward).bind(*copy_tree(self.first.args), **copy_tree(self.first.kwargs))
        given.apply_defaults()
        for each in floats if situation.varied else ():
            if not each.source.is_of_module:
                given.arguments[each.source.root] = _put(
                    given.arguments[each.source.root], each.source.steps, each.other
                )
        args, kwargs = given.args, given.kwargs
        if situation.narrow:
            args, kwargs = (map_tree(each, lambda x: _narrowed(x, situation.autocast)) for each in (args, kwargs))
        with contextlib.ExitStack() as stack:
            stack.enter_context(_in_mode(self.module, situation))
            stack.enter_context(torch.set_grad_enabled(situation.gradients))
            if situation.autocast is not None:
                stack.enter_context(torch.autocast("cpu", situation.autocast))
            if situation.varied:
                stack.enter_context(_varied(self.module, floats))
            try:
                return _Seen(situation, self._capture(args, kwargs))
            except CannotCaptureError as error:
                raise CannotTraceError(str(error)) from error

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        return capture(self.module, args, kwargs, leaves=self._leaves, observed=self._observed, result=True)

    def _observe(self) -> None:
        """Runs the module at two batches, and keeps what its leaves return."""
        second = next((call for call in self._calls if call.batch != self.first.batch), self.first)
        made: dict[str, list[Any]] = {path: [] for path in self._leaves}
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for call in (self.first, second):
                hooks = [self.module.get_submodule(path).register_forward_hook(_keeping(made[path])) for path in made]
                try:
                    self.module(*copy_tree(call.args), **copy_tree(call.kwargs))
                except Exception as error:
                    raise CannotTraceError(f"it cannot be run on its examples ({message_of(error)})") from error
                finally:
                    for hook in hooks:
                        hook.remove()
                    for buffer, value in buffers:
                        buffer.copy_(value)
        self._observed = {path: (results[0], results[-1]) for path, results in made.items() if len(results) == 2}

    def _decided(self, captured: Captured) -> Iterator[tuple[Source, Any]]:
        """The plain values of the user's own modules and objects that are read, with their sources."""
        for read in dict.fromkeys(captured.reads):
            source = read.source
            if not source.is_of_module or read.kind not in _DECIDES or any(map(_is_hidden, source.steps)):
                continue
            holder, value = self._holder(source)
            if not _is_of_torch(holder) and type(value) in (bool, int, float, str, type(None)):
                yield source, value

    def _holder(self, source: Source) -> tuple[nn.Module, Any]:
        """The innermost module on the way to a value, and the value."""
        holder = self.module
        value: Any = holder
        for kind, key in source.steps:
            value = getattr(value, key) if kind == "." else value[key]
            holder = value if isinstance(value, nn.Module) else holder
        return holder, value

    def _given(self) -> list[tuple[Source, Any]]:
        """What the arguments hold, with its sources."""
        arguments = bound_arguments(self.module, self.first).items()
        return [each for name, value in arguments for each in _leaves_in(value, Source(name, (), ""))]

    def _floats(self, captured: Captured) -> Iterator[_Float]:
        held = (each for each in self._decided(captured) if not _EPS.fullmatch(str(each[0].steps[-1][1])))
        for place, (source, value) in enumerate((*self._given(), *held)):
            if type(value) is float:
                yield _Float(source, value, value * (1 - (place + 1) / 1024) if value else (place + 1) / 1024)

    def difference(self, first: Captured) -> str | None:
        """Which part of a situation gives another graph, in words; None where none does."""
        seen = []
        for words, changed in _DIFFERENCES:
            seen.append(self._in_any_dtype(replace(_SITUATIONS[0], **changed), ()).captured)
            if _rows(first, seen[-1]) is None and _rows(seen[-1], first) is None:
                return f"does other operations {words} {_where(first, seen[-1])}".rstrip()
        one, other = seen[-2:]
        if _rows(one, other) is None and _rows(other, one) is None:
            return f"does other operations in float16 than in bfloat16 {_where(one, other)}".rstrip()
        return None

    def _flags(self, captured: Captured) -> list[str]:
        """The modules whose mode is read, by path."""
        sources = [read.source for read in captured.reads if read.source.is_of_module]
        paths = [each.path for each in sources if each.path is not None and each.steps[-1:] == ((".", "training"),)]
        return list(dict.fromkeys(self.path_of(path.rpartition(".")[0]) for path in paths))

    def _called(self, captured: Captured) -> tuple[str, ...]:
        """The inlined children that the forward calls, in the order of the modules."""
        found = {self.path_of(path) for node in captured.graph.nodes for path in modules_around(node)}
        return tuple(path for path in self.names.values() if path and path in found and path in self.inside)

    def path_of(self, path: str) -> str:
        """The first name of the module of a path."""
        try:
            return self.names.get(id(self.module.get_submodule(path)), path)
        except AttributeError:
            return path

    def _float_paths(self, captured: Captured, live: Collection[Source]) -> dict[str, bool]:
        """The float attributes that are read, by path, and whether they are conditions instead of read in each call."""
        read = {each.expression for each in live}
        floats = (source for source, value in self._decided(captured) if type(value) is float)
        return {source.path: source.expression not in read for source in floats if source.path is not None}

    def _conditions(self, captured: Captured, live: Collection[Source]) -> tuple[str, ...]:
        """What has to hold in a call, as Python: sizes and plain arguments, and attributes that are not read live."""
        self._check(captured.conditions)
        said = {each.expression for each in live}
        given = bound_arguments(self.module, self.first)
        found = [*_ranks(captured.conditions, given), *(each.text for each in captured.conditions)]
        for name, parameter in inspect.signature(self.module.forward).parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                found.append(f"len({name}) == {len(given[name])}")
            elif parameter.kind is parameter.VAR_KEYWORD:
                found.append(f"list({name}) == {constant(list(given[name]))}")
        for read in captured.reads:
            if read.source.root in given and read.source.expression not in said:
                found += self._of_argument(read, _followed(given[read.source.root], read.source.steps))
            elif read.source.root in given and not self._is_annotated(read.source.root, "float"):
                found.append(f"not isinstance({read.source.expression}, torch.Tensor)")
        for source, value in self._decided(captured):
            if source.expression not in said and source.steps[-1][1] != "training":
                found.append(_equals(self.expression(source), value))
        return tuple(dict.fromkeys(found))

    def _of_argument(self, read: Read, value: Any) -> list[str]:
        """The conditions on one argument, or on what is in it, that a read stands for."""
        text = read.source.expression
        if isinstance(value, torch.Tensor):
            return self._of_tensor(read.source)
        if isinstance(value, torch.Size):
            return [f"{text.removesuffix('.shape')}.dim() == {len(value)}"] if text.endswith(".shape") else []
        if isinstance(value, dict) and "DICT" in read.kind:
            return [f"list({text}) == {constant(list(value))}"]
        if isinstance(value, list | tuple) and read.kind == "SEQUENCE_LENGTH":
            return [*_type_is(text, value), f"len({text}) == {len(value)}"]
        if read.kind == "TYPE_MATCH" and type(value) not in _PLAIN:
            return _type_is(text, value)
        return [_equals(text, value)] if read.kind in _DECIDES else []

    def _is_annotated(self, name: str, *kinds: str) -> bool:
        """True for an argument that is annotated with one of some classes alone."""
        annotation = inspect.signature(self.module.forward).parameters[name].annotation
        return (annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")) in kinds

    def _of_tensor(self, source: Source) -> list[str]:
        """That an argument is a tensor, where its place in the signature allows for something else."""
        parameter = inspect.signature(self.module.forward).parameters[source.root]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.default is None:
            return [f"{source.expression} is not None"]
        if source.steps or self._is_annotated(source.root, "Tensor", "torch.Tensor"):
            return []
        is_open = parameter.annotation is not parameter.empty or parameter.default is not parameter.empty
        return [f"isinstance({source.expression}, torch.Tensor)"] if is_open else []

    def _check(self, conditions: Sequence[Condition]) -> None:
        """Raises where a condition does not hold for as many rows as a model is trained on, as far as batches tell."""
        first = self._calls[0]
        second = next((call for call in self._calls if call.batch != first.batch), first)
        given = [bound_arguments(self.module, call) for call in (first, second)]
        given.append({name: _larger(value, given[1][name]) for name, value in given[0].items()})
        for condition in conditions:
            for each in given:
                if not self._holds(condition.text, each):
                    raise CannotTraceError(
                        f"depends on the number of rows: {condition.text} {condition.place}".rstrip()
                    )

    def _check_calls(self, conditions: Sequence[str]) -> None:
        """Raises where an argument hides a function of a condition, or the module is called in several ways."""
        called = {name for each in conditions for name in re.findall(r"\b(\w+)\(", each)}
        hidden = next((name for name in bound_arguments(self.module, self.first) if name in called), None)
        if hidden is not None:
            raise CannotTraceError(f"argument '{hidden}' has a name that the generated text needs for itself")
        for call in self._calls[1:]:
            given = bound_arguments(self.module, call)
            other = next((each for each in conditions if not self._holds(each, given)), None)
            if other is not None:
                raise CannotTraceError(f"is called in several ways: {other} in one call, and not in another")

    def _holds(self, condition: str, arguments: Mapping[str, Any]) -> bool:
        scope = {"math": math, "torch": torch}
        try:
            return bool(eval(condition, scope, {**arguments, "self": self.module}))  # noqa: S307 - text that LoKA made
        except (AttributeError, IndexError, KeyError, TypeError, NameError):
            return False

    def expression(self, source: Source) -> str:
        """What the module holds, as Python on `self`."""
        dotted = _dotted(source.steps)
        text, rest = attribute(self.module, ".".join(dotted)), source.steps[len(dotted) :]
        return text + "".join(f".{key}" if kind == "." else f"[{key!r}]" for kind, key in rest)


class _Merged:
    """The operations of several captures that are alike: constants that move become what has their values.

    The first has the casts that do nothing in others. `flags` are the paths of modules whose mode is read. `lost` says
    what moves and is nothing that could be printed, `live` which floats are read in each call.
    """

    def __init__(self, reader: _Reader, seen: Sequence[_Seen], flags: Sequence[str], floats: Sequence[_Float]) -> None:
        self._reader, self._captures = reader, [each.captured for each in seen]
        self._flags = {path: tuple(each.situation.mode(path) for each in seen) for path in flags}
        self._floats = {tuple(f.other if each.situation.varied else f.value for each in seen): f.source for f in floats}
        self.live: list[Source] = []
        self.lost: list[str] = []
        self.ops: list[Op] = []
        self._graph = fx.Graph()
        self._arguments = {name: self._graph.placeholder(name) for name in bound_arguments(reader.module, reader.first)}
        self.ops += [Op(node, (), {}, "") for node in self._arguments.values()]
        self._held: dict[str, fx.Node] = {}  # by path, what the module holds
        self._found: dict[Any, fx.Node] = {}  # by source, what a way from an argument or an attribute leads to
        self._nodes: dict[fx.Node, fx.Node] = {}  # by the first capture's node
        self._dtypes: list[tuple[fx.Node, tuple[torch.dtype, ...]]] = []  # of the tensors so far, in all captures
        self._child = ""
        self._line: tuple[str, int] | None = None
        first = self._captures[0]
        rows = [_rows(first, each) or {} for each in self._captures]
        self._rows = {node: tuple(row[node] for row in rows) for node in _operations(first.graph)}
        filled = list(fills(first.graph))
        self._skipped = {node for each in filled for node in (each.tensor, *each.writes[:-1])}
        self._filled = {each.writes[-1]: each for each in filled}
        for node, row in self._rows.items():
            self._operation(node, row)
        self._result(first)

    def _operation(self, node: fx.Node, row: tuple[fx.Node, ...]) -> None:
        if node in self._skipped:
            return
        around = [self._reader.path_of(path) for path in modules_around(node)]
        self._child = next((path for path in reversed(around) if path in self._reader.inside), "")
        self._line = line_of(node)
        if node in self._filled:
            self._concatenation(self._filled[node])
            return
        own = [each if (each.op, each.target) == (node.op, node.target) else node for each in row]
        args = self._merged([each.args for each in own])
        kwargs = self._merged([dict(each.kwargs) for each in own])
        if node.target is operator.setitem:
            self._assignment(*args)
            return
        kind, target = node.op, node.target
        if target in _IN_PLACE:
            kind, target = (
                ("call_function", _IN_PLACE[target]) if self._is_new(row) else ("call_method", _METHODS[target])
            )
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
        plain = [arg if not isinstance(arg, TrainingFlag) else True for arg in args]
        made = self._graph.create_node(kind, target, tuple(_without_flags(plain)), _without_flags(dict(kwargs)))
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
        """A constant that moves: a flag, a dtype or a float."""
        if isinstance(values[0], bool):
            paths = [path for path, pattern in self._flags.items() if pattern == values]
            if self._child in paths:
                return TrainingFlag()
            if paths:
                return self._attribute(
                    Source("self", tuple((".", key) for key in f"{paths[0]}.training".lstrip(".").split(".")), "")
                )
        if isinstance(values[0], torch.dtype):
            node = self._argument_of(values)
            node = node or next((each for each, dtypes in reversed(self._dtypes) if dtypes == values), None)
            if node is not None:
                return self._add("call_function", getattr, (node, "dtype"), {})
        if isinstance(values[0], float) and values in self._floats:
            source = self._floats[values]
            self.live.append(source)
            return self._attribute(source) if source.is_of_module else self._argument(source)
        if isinstance(values[0], float):
            for node, dtypes in reversed(self._dtypes):
                limit = next((name for name in _LIMITS if _limits(name, dtypes) == values), None)
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
                given = [_placeholder(each, source) for each in self._captures]
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
            values = [_placeholder(each, source) for each in self._captures]
            self._note(found, values)
        return self._nodes[node]

    def _attribute(self, source: Source) -> fx.Node:
        dotted = _dotted(source.steps)
        path = self._first_name(dotted)
        if path not in self._held:
            self._held[path] = self._graph.get_attr(path)
            self.ops.append(Op(self._held[path], (), {}, self._child))
        return self._way(self._held[path], source.steps[len(dotted) :], ("self", path))

    def _first_name(self, dotted: Sequence[str]) -> str:
        holder = self._reader.path_of(".".join(dotted[:-1]))
        return ".".join(filter(None, (holder, dotted[-1])))

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

    def _is_new(self, row: Sequence[fx.Node]) -> bool:
        """True for `y += x` where nobody can tell it from `y + x`: this alone reads the new tensor y."""
        y = row[0].args[0]
        if not isinstance(y, fx.Node) or len(y.users) != 1 or not self._makes(y):
            return isinstance(y, fx.Node) and not isinstance(y.meta.get("example_value"), torch.Tensor)
        for node in row:
            left, right = (_value(each) for each in node.args[:2])
            if torch.result_type(left, right) != left.dtype or _shape(right) not in ((), tuple(left.shape)):
                return False
        return True

    def _makes(self, node: fx.Node) -> bool:
        """True for an operation that always returns a new tensor."""
        if node.op == "call_module":
            return makes_its_result(self._reader.module.get_submodule(str(node.target)))
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        return node.op.startswith("call") and name in MAKING and "out" not in node.kwargs and True not in node.args

    def _concatenation(self, fill: Fill) -> None:
        """What fills a new tensor, as one operation, with the pieces cast to its dtype as a write casts them."""
        dtypes = self._dtypes_of(fill.tensor)
        pieces = []
        for each, single in zip(fill.pieces, fill.single, strict=True):
            piece = self._of(each)
            if self._dtypes_of(each) != dtypes:
                wanted = dtypes[0] if len(set(dtypes)) == 1 else self._moving(dtypes)
                piece = self._add("call_method", "to", (piece, wanted), {})
            pieces.append(self._add("call_method", "unsqueeze", (piece, fill.dim), {}) if single else piece)
        self._nodes[fill.tensor] = self._add("call_function", torch.cat, (pieces, fill.dim), {})
        self._dtypes.append((self._nodes[fill.tensor], dtypes))

    def _dtypes_of(self, node: fx.Node) -> tuple[torch.dtype, ...]:
        """The dtype of a tensor in each capture."""
        if node in self._rows:
            return tuple(each.meta["example_value"].dtype for each in self._rows[node])
        source = self._captures[0].sources[node]
        return tuple(_placeholder(each, source).dtype for each in self._captures)

    def _assignment(self, tensor: fx.Node, index: Any, value: Any) -> None:
        """`y[:, :4] = x` as a write into a view of y."""
        if not all(map(_is_basic, index if isinstance(index, tuple) else (index,))):
            where = f" {place_in(*self._line)}" if self._line is not None else ""
            raise CannotTraceError(f"assignment into a tensor{where}")
        view = self._add("call_function", operator.getitem, (tensor, index), {})
        method = "copy_" if isinstance(value, fx.Node) else "fill_"
        self._add("call_method", method, (view, value), {})

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

        made = map_tree(first.result, leaf)
        self._child, self._line = "", line_of(output)
        node = self._graph.output(None)
        self.ops.append(Op(node, (made,), {}, ""))


_METHODS = {operator.iadd: "add_", operator.isub: "sub_", operator.imul: "mul_", operator.itruediv: "div_"}


_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_LIMITS = ("min", "max", "eps", "tiny")


def _limits(name: str, dtypes: Sequence[torch.dtype]) -> tuple[float, ...] | None:
    """The limits of floating-point dtypes by one name; None where one is no such dtype."""
    return (
        tuple(getattr(torch.finfo(each), name) for each in dtypes) if all(d.is_floating_point for d in dtypes) else None
    )


def _leaves_in(value: Any, source: Source) -> Iterator[tuple[Source, Any]]:
    """The leaves of an argument's dicts, lists and tuples."""
    if isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, list | tuple):
        parts = list(enumerate(value))
    else:
        yield source, value
        return
    for key, item in parts:
        yield from _leaves_in(item, Source(source.root, (*source.steps, ("[]", key)), ""))


def _put(value: Any, steps: Sequence[tuple[str, Any]], other: Any) -> Any:
    """An argument with another leaf."""
    if not steps:
        return other
    (_, key), *rest = steps
    if isinstance(value, dict):
        return {**value, key: _put(value[key], rest, other)}
    items = [_put(item, rest, other) if place == key else item for place, item in enumerate(value)]
    return items if isinstance(value, list) else tuple(items)


def _check_opaque(captured: Captured) -> None:
    """Raises for operations with graphs of their own: checkpoints, gradients of the user's own, branches on data."""
    for node in captured.graph.nodes:
        if node.op == "get_attr" and isinstance(captured.constants[node.target], nn.Module):
            user = next(iter(node.users))
            line = line_of(user)
            where = f" {place_in(*line)}" if line is not None else ""
            raise CannotTraceError(f"calls {user.target}, which has a graph of its own{where}")


def _operations(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op.startswith("call")]


def _rows(whole: Captured, other: Captured) -> dict[fx.Node, fx.Node] | None:
    """The operation of another capture for each of one, if they are the same ones; constants may differ.

    A cast of the first that would do nothing in the other has its operand there.
    """
    theirs = iter(_operations(other.graph))
    found: dict[fx.Node, fx.Node] = {}

    def form(value: Any, sources: Mapping[fx.Node, Source]) -> Any:
        """What tells an operand: its node in the other capture, or its source."""
        if isinstance(value, fx.Node):
            value, sources = (found[value], other.sources) if value in found else (value, sources)
            if value.op == "get_attr":
                return value.target
            return sources[value].text if value in sources else value
        if isinstance(value, tuple | list):
            return [form(item, sources) for item in value]
        if isinstance(value, dict):
            return [(key, form(item, sources)) for key, item in value.items()]
        if isinstance(value, slice):
            return [form(each, sources) for each in (value.start, value.stop, value.step)]
        return type(value).__name__

    met = next(theirs, None)
    for node in _operations(whole.graph):
        alike = met is not None and (node.op, node.target) == (met.op, met.target)
        ours = form((node.args, node.kwargs), whole.sources)
        if alike and met is not None and ours == form((met.args, met.kwargs), other.sources):
            found[node], met = met, next(theirs, None)
        elif (same := _uncast(node, found, whole, other)) is not None:
            found[node] = same
        else:
            return None
    return found if met is None else None


_CASTS = frozenset({"to", "float", "double", "half", "bfloat16", "type_as"})


def _uncast(cast: fx.Node, found: Mapping[fx.Node, fx.Node], whole: Captured, other: Captured) -> fx.Node | None:
    """What a cast reads, in another capture where it has the dtype already; None for any other operation."""
    if cast.op != "call_method" or cast.target not in _CASTS or not isinstance(cast.args[0], fx.Node):
        return None
    source, made = cast.args[0], cast.meta.get("example_value")
    if source in whole.sources:
        same = next((n for n, each in other.sources.items() if each.text == whole.sources[source].text), None)
    else:
        same = found.get(source)
    value = same.meta.get("example_value") if same is not None else None
    if not isinstance(value, torch.Tensor) or not isinstance(made, torch.Tensor):
        return None
    return same if (value.dtype, value.device) == (made.dtype, made.device) else None


def _where(a: Captured, b: Captured) -> str:
    """The user's line of the first operation that only one of two captures has."""
    for x, y in zip(_operations(a.graph), _operations(b.graph), strict=False):
        if (x.op, x.target) != (y.op, y.target):
            line = line_of(x) or line_of(y)
            return place_in(*line) if line is not None else ""
    longer = max((_operations(each.graph) for each in (a, b)), key=len)
    shorter = min(len(_operations(each.graph)) for each in (a, b))
    line = line_of(longer[shorter]) if len(longer) > shorter else None
    return place_in(*line) if line is not None else ""


def _value(operand: Any) -> Any:
    """The fake value of a node; a constant itself."""
    return operand.meta["example_value"] if isinstance(operand, fx.Node) else operand


def _placeholder(captured: Captured, source: Source) -> Any:
    """The value of a source in a capture; None where it does not read it."""
    return next((n.meta.get("example_value") for n, each in captured.sources.items() if each.text == source.text), None)


def _dotted(steps: Sequence[tuple[str, Any]]) -> list[str]:
    """The attributes at the beginning of a way."""
    count = next((place for place, (kind, _) in enumerate(steps) if kind != "."), len(steps))
    return [str(key) for _, key in steps[:count]]


def _outside(text: str) -> str:
    text = re.sub(r"G\['__import_\w+'\]\.", "the global ", text)  # of another file
    return re.sub(r"G\['(\w+)'\]", r"the global \1", text)


def _is_basic(item: Any) -> bool:
    return item is None or item is ... or type(item) is int or isinstance(item, slice | fx.Node)


def _shape(value: Any) -> tuple[Any, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _without_flags(value: Any) -> Any:
    """Arguments for a node of fx, which knows no flags."""
    if isinstance(value, TrainingFlag):
        return True
    if isinstance(value, tuple | list):
        return type(value)(map(_without_flags, value))
    if isinstance(value, dict):
        return {key: _without_flags(item) for key, item in value.items()}
    return value


def _ranks(conditions: Sequence[Condition], given: Mapping[str, Any]) -> Iterator[str]:
    """The ranks of the arguments whose sizes conditions look at."""
    for name, value in given.items():
        for source, leaf in _leaves_in(value, Source(name, (), "")):
            sizes = re.compile(rf"(?<![\w.\]]){re.escape(source.expression)}\.shape\[")
            if isinstance(leaf, torch.Tensor) and any(sizes.search(each.text) for each in conditions):
                yield f"{source.expression}.dim() == {leaf.dim()}"


def _type_is(expression: str, value: Any) -> list[str]:
    """That a value has its class, by name: text has no other way to the classes of the user's files."""
    kind = type(value)
    if kind in (list, tuple):
        return [f"type({expression}) is {kind.__name__}"]
    return [f"type({expression}).__qualname__ == {kind.__qualname__!r}"]


def _equals(expression: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return f"{expression} is {value}"
    return f"{expression} == {constant(value)}"


def _followed(value: Any, steps: Sequence[tuple[str, Any]]) -> Any:
    for kind, key in steps:
        value = getattr(value, key) if kind == "." else value[key]
    return value


def bound_arguments(module: nn.Module, call: ExampleCall) -> dict[str, Any]:
    """A call's arguments, with defaults, by name."""
    given = inspect.signature(module.forward).bind(*call.args, **call.kwargs)
    given.apply_defaults()
    return dict(given.arguments)


def _larger(a: Any, b: Any) -> Any:
    """Arguments for many samples, without values: sizes that differ between two batches grow as they do there."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dim() == b.dim():
        sizes = [m + _MANY * (n - m) for m, n in zip(a.shape, b.shape, strict=True)]
        return torch.empty(sizes, dtype=a.dtype, device="meta")
    if isinstance(a, tuple | list) and isinstance(b, tuple | list) and len(a) == len(b):
        return type(a)(_larger(x, y) for x, y in zip(a, b, strict=True)) if type(a) in (tuple, list) else a
    if isinstance(a, dict) and isinstance(b, dict):
        return {key: _larger(item, b.get(key)) for key, item in a.items()}
    if type(a) is int and type(b) is int:
        return a + _MANY * (b - a)
    return a


def _narrowed(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value


def _named(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a function of torch.nn.functional with names for the plain values at their end: `inplace=False`."""
    if getattr(target, "__module__", "") != torch.nn.functional.__name__ or not inspect.isfunction(target):
        return args, kwargs
    last = max((place for place, each in enumerate(args) if isinstance(each, fx.Node | tuple | list)), default=0)
    names = list(inspect.signature(target).parameters)
    return args[: last + 1], {**dict(zip(names[last + 1 :], args[last + 1 :], strict=False)), **kwargs}


def _keeping(made: list[Any]) -> Callable[..., None]:
    return lambda module, args, result: made.append(result)


def _after(node: fx.Node) -> Iterator[fx.Node]:
    while node.next.op != "root":
        node = node.next
        yield node


def _is_hidden(step: tuple[str, Any]) -> bool:
    """True for a step into a function: a leaf's stub, or what a function of the user's holds."""
    return step == (".", "forward") or str(step[1]).startswith("__")


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


@contextlib.contextmanager
def _in_mode(module: nn.Module, situation: _Situation) -> Iterator[None]:
    """The modules in training or in evaluation, as a situation says."""
    flags = [(child, child.training) for child in module.modules()]
    try:
        for name, child in module.named_modules():
            child.training = situation.mode(name)
        yield
    finally:
        for child, flag in flags:
            child.training = flag


@contextlib.contextmanager
def _varied(module: nn.Module, floats: Sequence[_Float]) -> Iterator[None]:
    """Float attributes at their other values."""
    held = [each for each in floats if each.source.is_of_module]
    try:
        for each in held:
            _set(module, each.source.steps, each.other)
        yield
    finally:
        for each in held:
            _set(module, each.source.steps, each.value)


def _set(module: nn.Module, steps: Sequence[tuple[str, Any]], value: float) -> None:
    holder, (kind, key) = _followed(module, steps[:-1]), steps[-1]
    with contextlib.suppress(AttributeError, TypeError):  # one that cannot be set is not varied
        if kind == ".":
            setattr(holder, key, value)
        else:
            holder[key] = value
