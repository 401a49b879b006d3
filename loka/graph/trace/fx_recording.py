"""Recording a forward with torch.fx: once in training and once in evaluation, merged into one list of operations."""

from __future__ import annotations

import math
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from loka.graph.guards import checked_keys, checked_length
from loka.graph.ir import CannotTraceError
from loka.graph.source import functions_of, live_floats
from loka.graph.trace.call_values import (
    EntryValues,
    Length,
    LoopError,
    Values,
    ValuesNeededError,
    computed_values,
    dict_of,
    is_size,
    length_of,
)
from loka.graph.trace.examples import ExampleCall
from loka.graph.trace.fixed_sizes import FixedSizes, GivenShapes
from loka.graph.trace.in_place import DEFAULT_WRITES, InPlaceProxy, InPlaceTracer, Writes
from loka.graph.trace.lint import place_in, training_reads
from loka.graph.trace.planned_tests import PlannedTest, PlannedTests, described
from loka.graph.trace.printer import TrainingFlag, is_identifier
from loka.graph.trace.watched_functions import ReadLog, traced_limits, watched
from loka.model.callables import message_of

_BY_TORCH: dict[object, Callable[..., Any]] = {math.sqrt: torch.sym_sqrt}  # of sizes that may be symbolic
_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag"})  # attributes that autograd sees


@dataclass(frozen=True, slots=True)
class Op:
    """One traced operation; `args` and `kwargs` hold fx nodes of the training trace, constants and `TrainingFlag`."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    child: str  # the inlined child whose forward it is part of, "" for the owner's own
    line: tuple[str, int] | None = None  # file and line in the user's code


@dataclass(frozen=True, slots=True)
class FxRecording:
    """The operations of a whole forward. `called` are the inlined children, in the order of their first calls."""

    ops: tuple[Op, ...]
    called: tuple[str, ...]
    reads: Mapping[str, Collection[str]]  # attributes read from each module, by its path
    writes_in_place: bool = False  # True if a statement has the form `y += x`
    tests: tuple[PlannedTest, ...] = ()  # of the arguments, with the answers that decided what is recorded
    of_dtype: str = ""  # a test that was answered as in bfloat16, and float32 answers otherwise, in words


def fx_record(
    module: nn.Module,
    expand: frozenset[str],
    calls: Sequence[ExampleCall],
    writes: Writes = DEFAULT_WRITES,
    entered: set[tuple[str, int]] | None = None,
) -> FxRecording:
    """Traces a module, and through its children in `expand` (relative names).

    Pass a copy: tracing may leave proxies in it. `calls` decide tests of traced values and the lengths of loops over
    them. `writes` says how `y += x` is recorded. What ran of the user's functions is added to
    `entered` (`Tests.enter`), also where tracing fails. Raises CannotTraceError with the reason and the line of the
    user's code.
    """
    entered = set() if entered is None else entered
    reads = ReadLog(module)
    module.train()  # its result is not used: a model's own train() may return nothing
    training = _trace(module, expand, calls, reads, writes, entered)
    module.eval()
    evaluation = _trace(module, expand, calls, reads, writes, entered)
    inlined = [module, *(module.get_submodule(name) for name in training.called)]
    ops, tests = _merge(training, evaluation, inlined)
    of_dtype = training.tests.of_dtype or evaluation.tests.of_dtype
    for tracer in (training, evaluation):
        tracer.release()
    return FxRecording(ops, tuple(training.called), reads.names, training.writes_in_place, tests, of_dtype)


def _trace(
    module: nn.Module,
    expand: frozenset[str],
    calls: Sequence[ExampleCall],
    reads: ReadLog,
    writes: Writes,
    entered: set[tuple[str, int]],
) -> _Tracer:
    """One trace, restarted at each loop whose length, and each test whose value has to be determined."""
    lengths: dict[int, Length] = {}
    computed: dict[str, Values | None] = {}
    fixed: dict[str, GivenShapes | None] = {}
    sizes = FixedSizes(module, calls)
    while True:
        tracer = _Tracer(expand, lengths, reads, PlannedTests(EntryValues(module, calls), computed, fixed))
        tracer.in_place, tracer.assignments.as_written = writes.in_place, writes.as_written
        try:
            tracer.run(module)
        except LoopError as loop:
            try:
                lengths[loop.place] = length_of(module, loop, calls)
            except Exception:  # noqa: BLE001  (user code on part of its way: the loop is refused then, with its place)
                lengths[loop.place] = None
        except ValuesNeededError as needed:
            try:
                computed[needed.node.name] = values = computed_values(module, needed, calls)
                fixed[needed.node.name] = sizes.given_shapes(needed.node, values)
            except Exception:  # noqa: BLE001  (as above: the test is refused then)
                computed[needed.node.name] = None
        else:
            return tracer
        finally:
            entered |= tracer.tests.entered


class _Repeating(fx.Proxy):
    """A proxy that may say how often a list is repeated (`[1] * x.dim()`)."""

    def __mul__(self, other: Any) -> Any:
        return self._times(other) if isinstance(other, list | tuple) else super().__mul__(other)  # type: ignore[misc]

    def __rmul__(self, other: Any) -> Any:
        return self._times(other) if isinstance(other, list | tuple) else super().__rmul__(other)  # type: ignore[misc]

    def _times(self, items: Any) -> Any:
        tracer = self.tracer
        return tracer.tests.repeated(items, self) if isinstance(tracer, _Tracer) else NotImplemented


class _ViewsInPlace(_Repeating, InPlaceProxy):
    """A proxy whose views by attribute are recorded where they are taken; torch.fx records them at their first use.

    Later, their gradients would be added up in another order.
    """

    def __getattr__(self, name: str) -> Any:
        found = _Attribute(self, name)
        if name in _VIEWS:
            _ = found.node  # makes it
        return found

    def __len__(self) -> int:
        # Not torch.fx's RuntimeError: Python asks for a hint before it unpacks (`[*features]`), and goes on without.
        raise TypeError("'len' is not supported")


class _Attribute(_Repeating, fx.proxy.Attribute):
    """An attribute of a proxy, such as `x.shape`; recorded at its first use."""

    def __len__(self) -> int:
        raise TypeError("'len' is not supported")  # as above


class _Tracer(InPlaceTracer):
    """torch.fx's tracer: leaves are all children but those in `expand`; buffers are proxies; floats are read live.

    `lengths` maps a loop's place to its number of items, or keys; None for a loop that cannot be unrolled.
    """

    def __init__(
        self, expand: frozenset[str], lengths: Mapping[int, Length], reads: ReadLog, tests: PlannedTests
    ) -> None:
        super().__init__(autowrap_modules=(math,))
        self.expand, self.lengths, self.reads, self.tests = expand, lengths, reads, tests
        tests.tracer = self
        self.called: dict[str, None] = {}
        self.children: dict[fx.Node, str] = {}
        self.lines: dict[fx.Node, tuple[str, int] | None] = {}
        self._inside = [""]
        self._failed = ""  # the innermost child in whose forward tracing stopped
        self._expanded: list[tuple[str, nn.Module]] = []
        self._files: set[str] = set()
        self._tensors: dict[int, str] = {}
        self._dicts: dict[fx.Node, tuple[fx.Proxy, tuple[str | int, ...]]] = {}  # looped over: their guards and keys

    def run(self, module: nn.Module) -> None:
        """Fills `graph`; raises CannotTraceError."""
        self._expanded = [(name, module.get_submodule(name)) for name in ("", *sorted(self.expand))]
        functions = [function for _, child in self._expanded for function in functions_of(child)]
        self._files = {function.__code__.co_filename for function in functions}
        named = (*reversed(list(module.named_buffers())), *reversed(list(module.named_parameters())))
        self._tensors = {id(tensor): name for name, tensor in named}
        saved = [(child, dict(vars(child))) for _, child in self._expanded]
        try:
            with self.reads.kept(), watched(functions, self.tests), traced_limits():
                self.graph = self.trace(module)
            self.assignments.check(self.graph)
        except CannotTraceError as error:
            raise error.inside_of(self._failed) from error.__cause__
        except (LoopError, ValuesNeededError):
            raise
        except Exception as error:  # user code meets proxies: anything can be raised
            where = self._place(traceback.extract_tb(error.__traceback__))
            raise CannotTraceError(f"{reason_of(error)} {where}".strip()).inside_of(self._failed) from error
        finally:
            for child, attributes in saved:
                vars(child).clear()
                vars(child).update(attributes)
        for node in self.graph.nodes:
            if node.op == "get_attr" and node.target.rpartition(".")[2].startswith("_tensor_constant"):
                line = self.lines.get(node)
                where = place_in(*line) if line is not None else ""
                what = "the forward makes a constant tensor, which would be frozen at its first value"
                raise CannotTraceError(f"{what} {where}".strip())

    def release(self) -> None:
        """Let go of the module: closures of torch.fx keep a tracer until garbage is collected."""
        self._expanded, self.root = [], nn.Module()
        del self.tests

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.expand

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        path = self.path_of_module(m)
        if path not in self.expand:
            return super().call_module(m, forward, args, kwargs)
        self.called[path] = None
        self._inside.append(path)
        try:
            return super().call_module(m, forward, args, kwargs)
        except (LoopError, ValuesNeededError):
            raise
        except BaseException:
            self._failed = self._failed or path
            raise
        finally:
            self._inside.pop()

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Parameters and buffers as proxies; torch.fx's own method searches all Parameters at each access."""
        name = self._tensors.get(id(attr_val))
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def create_arg(self, a: Any) -> Any:
        with self.reads.unheard():
            return super().create_arg(a)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _ViewsInPlace(node, self)

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        with self.reads.unheard():
            return super().create_proxy(*args, **kwargs)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if kind == "call_function" and getattr(target, "__module__", None) == math.__name__:
            if target not in _BY_TORCH:
                where = self._place(traceback.extract_stack())
                raise CannotTraceError(
                    f"math.{target.__name__} of a traced value (compute this number in __init__, or by torch) {where}"
                )
            target = _BY_TORCH[target]
        node = super().create_node(kind, target, *args, **kwargs)
        self.children[node] = self._inside[-1]
        self.lines[node] = self._line()
        return node

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        made = super().create_args_for_root(root_fn, is_module, concrete_args)
        made[1][:] = [self._given(each) for each in made[1]]
        for path, child in self._expanded:
            for name in live_floats(child, functions_of(child)):
                if not is_identifier(name):
                    raise CannotTraceError(f"float attribute {name!r} would be frozen")
                vars(child)[name] = self.create_proxy("get_attr", f"{path}.{name}".lstrip("."), (), {})
        self.reads.listen()
        return made

    def _given(self, argument: Any) -> Any:
        """An argument of the forward; of `*args` and `**kwargs` what they hold in all calls."""
        if not isinstance(argument, fx.Proxy) or not str(argument.node.target).startswith("*"):
            return argument
        mark = str(argument.node.target)
        argument.node.target = mark.lstrip("*")
        held: Any = argument
        if mark.startswith("**"):
            return {name: held[name] for name in self.tests.test_keys(argument)}
        return tuple(held[place] for place in range(self.tests.test_len(argument)))

    def to_bool(self, obj: fx.Proxy) -> bool:
        return self.tests.test_truth(obj.node)

    def iter(self, obj: fx.Proxy) -> Any:
        try:
            return super().iter(obj)
        except fx.proxy.TraceError:
            loop = LoopError(self.graph, obj.node)
        if is_size(obj.node):
            return iter([obj[place] for place in range(self.tests.test_len(obj))])  # type: ignore[index]
        if dict_of(obj.node) in self._dicts:
            return self._items_of_dict(obj.node)
        if loop.place not in self.lengths:
            raise loop
        length = self.lengths[loop.place]
        if length is None:
            where = self._place(traceback.extract_stack())
            fixed = "which is no list or tensor of one length in all calls"
            if dict_of(obj.node) is not obj.node:
                fixed = "which is no dict of the same keys in all calls"
            raise CannotTraceError(f"loop over {described(obj.node)}, {fixed} {where}".strip())
        if isinstance(length, tuple):
            source = dict_of(obj.node)
            guard = self.create_proxy("call_function", checked_keys, (fx.Proxy(source, self), *length), {})
            self._dicts[source] = guard, length
            return self._items_of_dict(obj.node)
        items = self.create_proxy("call_function", checked_length, (obj, length), {})
        return iter([items[place] for place in range(length)])  # type: ignore[index]

    def _items_of_dict(self, node: fx.Node) -> Iterator[Any]:
        """What a loop over a dict of known keys, or over its keys, values or items, meets."""
        guard, keys = self._dicts[dict_of(node)]
        view = str(node.target) if dict_of(node) is not node else "keys"
        if view == "keys":
            return iter(keys)
        values = [(key, guard[key]) for key in keys]  # type: ignore[index]
        return iter(values if view == "items" else [value for _, value in values])

    def is_size(self, size: fx.Proxy, number: int) -> bool:
        return self.tests.is_number(size, number)

    def is_torch(self, child: str) -> bool:
        """True for a child of torch.nn, whose outputs have the same types in all calls."""
        return type(self.root.get_submodule(child)).__module__.startswith("torch.nn.")

    def place(self) -> str:
        """The line of the user's code that is being traced, as text; "" where there is none."""
        return self._place(traceback.extract_stack())

    def _line(self) -> tuple[str, int] | None:
        """File and line of the innermost call in the functions that are being traced."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename not in self._files:
            frame = frame.f_back
        return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)

    def _place(self, frames: traceback.StackSummary) -> str:
        """The innermost line in the functions that are being traced, as text; "" where there is none."""
        for frame in reversed(frames):
            if frame.filename in self._files and frame.lineno is not None:
                return place_in(frame.filename, frame.lineno)
        return ""


def _merge(
    training: _Tracer, evaluation: _Tracer, modules: Iterable[nn.Module]
) -> tuple[tuple[Op, ...], tuple[PlannedTest, ...]]:
    """The operations and tests of both traces.

    Raises CannotTraceError if more than the value of `self.training` differs.
    """
    ours, theirs = list(training.graph.nodes), list(evaluation.graph.nodes)
    same = dict(zip(theirs, ours, strict=False))
    ops = []
    try:
        if len(ours) != len(theirs):
            raise _DifferentError
        for a, b in zip(ours, theirs, strict=True):
            if (a.op, a.target) != (b.op, b.target):
                raise _DifferentError
            args, kwargs = _both(a.args, b.args, same), _both(dict(a.kwargs), dict(b.kwargs), same)
            ops.append(Op(a, args, kwargs, training.children[a], training.lines[a]))
    except _DifferentError:
        at = training_reads(modules)
        raise CannotTraceError(f"does other operations in training than in evaluation {at}".rstrip()) from None
    tests = [*training.tests.found, *(PlannedTest(same[each.node], each.text) for each in evaluation.tests.found)]
    return tuple(ops), tuple(dict.fromkeys(tests))


class _DifferentError(Exception):
    """The two traces differ."""


def _both(a: Any, b: Any, same: dict[fx.Node, fx.Node]) -> Any:
    """An argument merged from both traces; `TrainingFlag` where it is True in training and False in evaluation."""
    if isinstance(a, fx.Node) and isinstance(b, fx.Node) and same.get(b) is a:
        return a
    if a is True and b is False:
        return TrainingFlag()
    if isinstance(a, tuple | list) and isinstance(b, tuple | list) and len(a) == len(b):
        items = [_both(x, y, same) for x, y in zip(a, b, strict=True)]
        return items if isinstance(a, list) else tuple(items)
    if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
        return {key: _both(a[key], b[key], same) for key in a}
    if isinstance(a, slice) and isinstance(b, slice):
        return slice(*(_both(x, y, same) for x, y in ((a.start, b.start), (a.stop, b.stop), (a.step, b.step))))
    if type(a) is type(b) and not isinstance(a, fx.Node | torch.Tensor) and (a == b or repr(a) == repr(b)):
        return a
    raise _DifferentError


_LONGEST = 160  # characters quoted of an error that is not known
_TRACED = r"(?:Proxy|_ViewsInPlace|Attribute)\b"
# Messages of Python 3.11 to 3.13, numpy 2, and torch 2.11 and newer.
_KNOWN = (
    (r"argument of type: <class '(?:[^']*\.)?(\w+)'>", "an object of class {0} is passed to an operation or a child"),
    (r"item assignment", "assignment into a tensor"),
    (r"'len' is not supported", "len of a tensor"),
    (r"__array_struct__|__array__", "numpy is called on a tensor"),
    (r"__cuda_array_interface__", "a new tensor is made of a traced value"),
    (r"Keys for dictionaries|^Proxy\(", "a tensor or a size is the key of a dict"),
    (rf"(?:number|string|integer|indices|format|__round__|__index__).*{_TRACED}|{_TRACED}.*(?:integer|__)", ""),
)
_NUMBER = "Python needs a plain number where a traced value stands (compute this number in __init__, or by torch)"


def reason_of(error: BaseException) -> str:
    """The reason why a forward cannot be traced, for an error that its code raised on traced values."""
    text = message_of(error)
    for pattern, words in _KNOWN:
        found = re.search(pattern, text)
        if found is not None:
            return words.format(*found.groups()) or _NUMBER
    return f"its code does not run on traced values: it raises {type(error).__name__} ('{text[:_LONGEST]}')"
