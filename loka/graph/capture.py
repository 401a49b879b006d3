"""Torch's own capture of a forward: one torch-level graph, with everything that it depends on.

`torch.compile` hands a custom backend the graph that Dynamo has read from Python (public API); the backend here keeps
it and computes nothing. What is left outside is told: where each placeholder comes from, which plain values were read,
and which conditions on sizes the graph relies on. Imports only torch and the standard library beside LoKA's errors, as
a training machine captures, too.

The frame that Dynamo compiles is a function of this module, made anew for each capture: the user's functions are
inlined into it, so that their own caches, recompile limits and observed sizes stay as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import linecache
import logging
import operator
import os
import random
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from loka.errors import LokaError

_STEP = re.compile(r"\.(\w+)(\(\))?|\[('(?:[^'\\]|\\.)*'|-?\d+)\]")
_TABLES = frozenset({"_modules", "_parameters", "_buffers", "__dict__"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LONGEST = 300  # characters quoted of an explanation of torch's
_SYMBOL = re.compile(r"\b[suz]f?\d+\b")
_SIZE = re.compile(r"<([^<>]*)>")  # Dynamo's name of a size, in the text of a condition
_TORCH = str(Path(torch.__file__).parent) + os.sep
_NOTHING = object()  # no result was asked for


class CannotCaptureError(LokaError):
    """A forward that torch cannot read as one graph; the message is torch's explanation, with the line."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value comes from: `root` is "self", an argument of the forward, or "" for anything outside of both.

    `steps` lead from there to it, attributes as (".", name) and items as ("[]", key). Outside, `text` is Dynamo's name.
    """

    root: str
    steps: tuple[tuple[str, Any], ...]
    text: str

    @property
    def path(self) -> str | None:
        """The dotted path of what is reached from the module by attributes alone: "layers.0.weight"; None otherwise."""
        return ".".join(str(key) for _, key in self.steps) if self.is_of_module and self._is_dotted else None

    @property
    def is_of_module(self) -> bool:
        """True for what the module holds."""
        return self.root == "self"

    @property
    def _is_dotted(self) -> bool:
        return all(kind == "." for kind, _ in self.steps)

    @property
    def expression(self) -> str:
        """The source as Python on the forward's arguments: "batch['user'].values"; its text for what is outside."""
        if not self.root:
            return self.text
        return self.root + "".join(f".{key}" if kind == "." else f"[{key!r}]" for kind, key in self.steps)


@dataclass(frozen=True, slots=True)
class Read:
    """A plain value that the graph has as a constant, or that decided what is in it."""

    source: Source
    kind: str  # Dynamo's name of the guard: CONSTANT_MATCH, BOOL_FALSE, TYPE_MATCH, ...


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on sizes of the arguments under which the graph is the forward: "x.shape[0] > 5"."""

    text: str
    line: tuple[str, int] | None  # of the user's code that relies on it


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A forward as torch has read it.

    The graph's placeholders are Parameters, buffers, other tensors, and sizes; `sources` says what each is. Nodes have
    fake values (`example_value`), the stack of modules (`nn_module_stack`) and the user's line (`stack_trace`) in
    `meta`. A call of a leaf is a `call_module` node with the leaf's path as its target. `result` is what the forward
    returns, with nodes in the place of tensors and of sizes; None where it was not asked for.
    """

    graph: fx.Graph
    constants: Mapping[str, torch.Tensor]  # of the graph's get_attr nodes: tensors made of plain numbers
    sources: Mapping[fx.Node, Source]
    reads: tuple[Read, ...]
    conditions: tuple[Condition, ...]
    result: Any = None


@dataclass(slots=True)
class _Kept:
    """What the backend keeps of one compilation."""

    module: fx.GraphModule | None = None
    sources: dict[fx.Node, str] = field(default_factory=dict)
    reads: tuple[tuple[str, str], ...] = ()
    conditions: tuple[tuple[str, tuple[str, int] | None], ...] = ()


class _Read(Exception):  # noqa: N818 - ends a compilation whose result nobody needs
    """The graph has been kept."""


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    leaves: Collection[str] = (),
    symbolic: bool = True,
    hooks: bool = False,
    result: bool = False,
) -> Captured:
    """The forward of `module` as one graph, for arguments like these; nothing is computed, and nothing is left behind.

    Args:
        module: On any device, meta included. Its mode, and whether gradients and autocast are on, are the caller's.
        args: Positional arguments of the forward. Tensors may be fake.
        kwargs: Keyword arguments.
        leaves: Paths of children whose calls stay one node each.
        symbolic: Sizes of the arguments' tensors are symbols wherever the forward allows. Otherwise those dimensions
            are that `torch._dynamo.mark_dynamic` has marked.
        hooks: Read the module's own hooks, too.
        result: Find what the forward returns. It must not change anything but tensors then.

    Raises:
        CannotCaptureError: torch cannot read the forward as one graph, or Dynamo is off.
    """
    kept = _Kept()
    bound = _bound(module, args, dict(kwargs or {}))
    with _left_as_it_was(module), _leaves_of(module, leaves) as stubs:
        while True:
            stubs.install()
            try:
                made = _compile(module, bound, kept, symbolic, hooks, result)
                break
            except _FormNeededError as needed:
                stubs.forms[needed.path] = needed.form
        return _captured(module, bound, kept, stubs, made)


@dataclass(frozen=True, slots=True)
class _Bound:
    """The arguments of a call by the names of the forward's signature, defaults included."""

    names: tuple[str, ...]  # of the positional ones, in order
    rest: str  # the name of `*args`; "" without
    keywords: str  # the name of `**kwargs`; "" without
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    known: frozenset[str]  # names of its keyword arguments

    def source(self, name: str) -> Source:
        """A source of Dynamo's, as one of the forward's own arguments."""
        root, steps = _parsed(name)
        if root == "self":
            return Source("self", steps, name)
        if root == "args" and steps and isinstance(steps[0][1], int):
            place = steps[0][1]
            if place < len(self.names):
                return Source(self.names[place], steps[1:], name)
            return Source(self.rest, (("[]", place - len(self.names)), *steps[1:]), name)
        if root == "kwargs" and steps:
            own = str(steps[0][1])
            return Source(own, steps[1:], name) if own in self.known else Source(self.keywords, steps, name)
        return Source("", (), name)

    def tensors(self) -> Iterator[tuple[Source, torch.Tensor]]:
        """The tensors among the arguments, each with its source."""
        for name, value in zip(self.names, self.args, strict=False):
            yield from _tensors_in(value, Source(name, (), ""))
        yield from _tensors_in(self.args[len(self.names) :], Source(self.rest, (), ""))
        for name, value in self.kwargs.items():
            of_all = Source(self.keywords, (("[]", name),), "")
            yield from _tensors_in(value, Source(name, (), "") if name in self.known else of_all)


def _tensors_in(value: Any, source: Source) -> Iterator[tuple[Source, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield source, value
        return
    if isinstance(value, dict):
        parts = [(("[]", key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(("[]", place), item) for place, item in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [((".", each.name), getattr(value, each.name)) for each in dataclasses.fields(value)]
    else:
        parts = []
    for step, item in parts:
        yield from _tensors_in(item, Source(source.root, (*source.steps, step), ""))


def _bound(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Bound:
    kinds = inspect.Parameter
    try:
        signature = inspect.signature(module.forward)
        given = signature.bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise CannotCaptureError(f"the arguments do not fit the forward of {type(module).__name__}: {error}") from error
    given.apply_defaults()
    parameters = signature.parameters.values()
    names = tuple(p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD))
    rest = next((p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), "")
    keywords = next((p.name for p in parameters if p.kind is kinds.VAR_KEYWORD), "")
    own = frozenset(p.name for p in parameters if p.kind is kinds.KEYWORD_ONLY)
    return _Bound(names, rest, keywords, given.args, given.kwargs, own)


def _parsed(name: str) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """Root and steps of a source by Dynamo's name for it; ("", ()) for what is outside of the call.

    >>> _parsed("L['self']._modules['a']._parameters['weight']")
    ('self', (('.', 'a'), ('.', 'weight')))
    """
    if not name.startswith("L["):
        return "", ()
    steps: list[tuple[str, Any]] = []
    place, in_table = 1, False
    while place < len(name):
        found = _STEP.match(name, place)
        if found is None:
            return "", ()
        place = found.end()
        attribute, called, item = found.groups()
        if called and attribute == "size":
            attribute = "shape"
        elif called:
            return "", ()
        if attribute in _TABLES:
            in_table = True
            continue
        if attribute is not None:
            steps.append((".", attribute))
        else:
            key = _key(item)
            steps.append((".", key) if in_table else ("[]", key))
        in_table = False
    (_, root), *rest = steps
    return str(root), tuple(rest)


def _key(text: str) -> str | int:
    return int(text) if not text.startswith("'") else str(text[1:-1].encode().decode("unicode_escape"))


def _whole(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return self(*args, **kwargs)


def _forward(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return self.forward(*args, **kwargs)


def _compile(module: nn.Module, bound: _Bound, kept: _Kept, symbolic: bool, hooks: bool, result: bool) -> Any:
    """Runs Dynamo; the forward's result with fake tensors, `_NOTHING` where it is not asked for."""

    def keep(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        _keep(kept, graph)
        if not result:
            raise _Read
        outputs = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        values = tuple(each.meta["example_value"] if isinstance(each, fx.Node) else each for each in outputs)
        return lambda *_: values

    entry = _whole if hooks else _forward
    # A copy of the code, so that one capture knows nothing of another.
    own = FunctionType(entry.__code__.replace(), globals(), entry.__name__)
    compiled = torch.compile(own, backend=keep, fullgraph=True, dynamic=True if symbolic else None)
    try:
        made = compiled(module, bound.args, bound.kwargs)
    except Exception as error:  # Dynamo and the user's code can raise anything
        needed = _cause(error, _FormNeededError)
        if needed is not None:
            raise needed from None
        if _cause(error, _Read) is not None:
            return _NOTHING
        raise CannotCaptureError(_explanation(error)) from error
    if kept.module is None and torch._dynamo.config.disable:
        raise CannotCaptureError("torch's Dynamo is off (TORCHDYNAMO_DISABLE, or torch._dynamo.config.disable)")
    return made


def _keep(kept: _Kept, graph: fx.GraphModule) -> None:
    """Keeps what Dynamo knows during the compilation alone."""
    context = torch._guards.TracingContext.get()
    kept.module = graph
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            source = getattr(node.meta.get("grapharg"), "source", None)
            kept.sources[node] = _name_of(source)
    kept.reads = tuple((each.name, each.create_fn_name()) for each in context.guards_context.dynamo_guards)
    kept.conditions = _conditions(context.fake_mode.shape_env) if context.fake_mode is not None else ()


def _name_of(source: Any) -> str:
    """Dynamo's name of a source; a method before torch 2.12."""
    if source is None:
        return ""
    name = source.name
    return str(name() if callable(name) else name)


def _conditions(env: Any) -> tuple[tuple[str, tuple[str, int] | None], ...]:
    """The conditions on sizes as Python, with Dynamo's names for the sizes, and the lines that rely on them."""
    if env is None:
        return ()
    from torch.utils._sympy.printers import PythonPrinter  # imports sympy, which torch itself imports as late

    printed = PythonPrinter()
    names = {str(symbol): _name_of(sources[0]) for symbol, sources in env.var_to_sources.items() if sources}
    found: list[tuple[str, tuple[str, int] | None]] = [
        (f"{symbol} == {printed.doprint(to)}", None) for symbol, to in env.replacements.items()
    ]
    found += [(printed.doprint(guard.expr), _line_of(guard)) for guard in env.guards]
    known = [(text, line) for text, line in found if set(_SYMBOL.findall(text)) <= names.keys()]
    return tuple((_SYMBOL.sub(lambda found: f"<{names[found[0]]}>", text), line) for text, line in known)


def _line_of(guard: Any) -> tuple[str, int] | None:
    stack = getattr(guard.sloc, "user_stack", None)
    frames = [frame for frame in stack or () if not _is_of_torch(frame.filename)]
    return (frames[-1].filename, frames[-1].lineno) if frames else None


def _captured(module: nn.Module, bound: _Bound, kept: _Kept, leaves: _Leaves, made: Any) -> Captured:
    if kept.module is None:
        raise CannotCaptureError(f"the forward of {type(module).__name__} does nothing that torch could read")
    graph = kept.module.graph
    sources = {node: bound.source(name) for node, name in kept.sources.items()}
    outputs = next(node for node in graph.nodes if node.op == "output").args[0]
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is _call_leaf:
            leaves.restore(graph, node)
    constants = {n.target: getattr(kept.module, n.target) for n in graph.nodes if n.op == "get_attr"}
    reads = tuple(dict.fromkeys(Read(bound.source(name), kind) for name, kind in kept.reads if name))
    texts = ((_SIZE.sub(lambda size: bound.source(size[1]).expression, text), line) for text, line in kept.conditions)
    conditions = tuple(Condition(text, line) for text, line in dict.fromkeys(texts))
    values: dict[int, Any] = {id(value): source for source, value in bound.tensors()}
    values |= {id(each.meta["example_value"]): each for each in outputs if isinstance(each, fx.Node)}
    result = None if made is _NOTHING else map_tree(made, lambda leaf: values.get(id(leaf), leaf))
    return Captured(graph, constants, sources, reads, conditions, result)


def map_tree(value: Any, function: Callable[[Any], Any]) -> Any:
    """A value with each leaf of its dicts, lists, tuples and dataclasses replaced."""
    if isinstance(value, dict):
        return type(value)((key, map_tree(item, function)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tree(item, function) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tree(item, function) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {each.name: map_tree(getattr(value, each.name), function) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    return function(value)


class _FormNeededError(Exception):
    """A leaf returns more than one tensor; capture starts again, with the form of its result known."""

    def __init__(self, path: str, form: Any) -> None:
        super().__init__(path)
        self.path, self.form = path, form


@dataclass(slots=True)
class _Leaves:
    """Children whose calls stay nodes; `forms` has their results, with places in the flat list for tensors."""

    modules: dict[str, nn.Module]
    forwards: dict[str, Callable[..., Any]]
    forms: dict[str, Any] = field(default_factory=dict)

    def run(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a leaf on fake tensors: its result if that is one tensor, otherwise its tensors."""
        mode = torch._guards.detect_fake_mode((args, kwargs))
        if mode is None:
            return self.forwards[path](*args, **kwargs)
        allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
        try:
            made = self.forwards[path](*args, **kwargs)
        finally:
            mode.allow_non_fake_inputs = allowed
        if isinstance(made, torch.Tensor):
            return made
        flat: list[torch.Tensor] = []
        form = map_tree(made, lambda leaf: _placed(leaf, flat))
        if path not in self.forms:
            raise _FormNeededError(path, form)
        return tuple(flat)

    def install(self) -> None:
        """Gives the leaves forwards that Dynamo takes as one node, and takes their hooks, which a call will run."""
        for path, child in self.modules.items():
            vars(child).update({name: OrderedDict() for name in _HOOKS if name in vars(child)}, forward=self.stub(path))

    def stub(self, path: str) -> Callable[..., Any]:
        """What stands for a leaf's forward, for Dynamo to read."""
        form = self.forms.get(path)

        def forward(*args: Any, **kwargs: Any) -> Any:
            made = _call_leaf(path, *args, **kwargs)
            return made if form is None else _filled(form, made)

        return forward

    def restore(self, graph: fx.Graph, node: fx.Node) -> None:
        """Makes a node the call of a module, whose tensors are taken from its result instead of the flat list."""
        path = str(node.args[0])
        node.op, node.target, node.args = "call_module", path, node.args[1:]
        if path not in self.forms:
            return
        steps = dict(_places(self.forms[path], ()))
        for item in list(node.users):
            *way, (kind, key) = steps[_Place(item.args[1])]
            of = node
            with graph.inserting_before(item):
                for each, name in way:
                    of = graph.call_function(operator.getitem if each == "[]" else getattr, (of, name))
            item.target, item.args = operator.getitem if kind == "[]" else getattr, (of, key)


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor's place in the flat list of a leaf's result."""

    index: Any


def _placed(leaf: Any, flat: list[torch.Tensor]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    flat.append(leaf)
    return _Place(len(flat) - 1)


def _filled(form: Any, flat: Sequence[torch.Tensor]) -> Any:
    """A form with the tensors in their places; Dynamo reads this function."""
    if isinstance(form, _Place):
        return flat[form.index]
    if isinstance(form, dict):
        return {key: _filled(item, flat) for key, item in form.items()}
    if isinstance(form, tuple) and hasattr(form, "_fields"):
        return type(form)(*[_filled(item, flat) for item in form])
    if isinstance(form, list):
        return [_filled(item, flat) for item in form]
    if isinstance(form, tuple):
        return tuple([_filled(item, flat) for item in form])
    if dataclasses.is_dataclass(form) and not isinstance(form, type):
        return type(form)(**{each.name: _filled(getattr(form, each.name), flat) for each in dataclasses.fields(form)})
    return form


def _places(form: Any, steps: tuple[tuple[str, Any], ...]) -> Iterator[tuple[_Place, tuple[tuple[str, Any], ...]]]:
    """The places in a form, each with the steps that lead to it."""
    if isinstance(form, _Place):
        yield form, steps
    elif isinstance(form, dict):
        for key, item in form.items():
            yield from _places(item, (*steps, ("[]", key)))
    elif isinstance(form, list | tuple):
        for place, item in enumerate(form):
            yield from _places(item, (*steps, ("[]", place)))
    elif dataclasses.is_dataclass(form) and not isinstance(form, type):
        for each in dataclasses.fields(form):
            yield from _places(getattr(form, each.name), (*steps, (".", each.name)))


_LEAVES: ContextVar[_Leaves] = ContextVar("leaves")


def _call_leaf(path: str, *args: Any, **kwargs: Any) -> Any:
    """A leaf's call: one node for Dynamo, which runs it on fake tensors to know what it returns."""
    return _LEAVES.get().run(path, args, kwargs)


@contextlib.contextmanager
def _leaves_of(module: nn.Module, paths: Collection[str]) -> Iterator[_Leaves]:
    modules = {path: module.get_submodule(path) for path in paths}
    if modules:
        torch.compiler.allow_in_graph(_call_leaf)  # type: ignore[no-untyped-call]
    leaves = _Leaves(modules, {path: child.forward for path, child in modules.items()})
    token = _LEAVES.set(leaves)
    try:
        yield leaves
    finally:
        _LEAVES.reset(token)


@contextlib.contextmanager
def _left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Everything that a capture could change outside of it, restored: attributes, random states, settings, warnings."""
    held = [(child, dict(vars(child))) for child in module.modules()]
    state, python = torch.get_rng_state(), random.getstate()
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    log = logging.getLogger("torch._dynamo")
    disabled = log.disabled
    try:
        with warnings.catch_warnings(), torch.compiler.set_stance("default"), _settings():
            warnings.simplefilter("ignore")
            log.disabled = True
            yield
    finally:
        log.disabled = disabled
        for child, attributes in held:
            vars(child).clear()
            vars(child).update(attributes)
        torch.set_rng_state(state)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(drawn)


def _settings() -> contextlib.AbstractContextManager[Any]:
    """Dynamo's settings during a capture: no sizes are remembered, and equal ones are not taken for one."""
    stack = contextlib.ExitStack()
    wanted: dict[str, Any] = {
        "automatic_dynamic_shapes": False, "assume_static_by_default": True, "specialize_float": True,
        "allow_rnn": True, "suppress_errors": False, "side_effect_replay_policy": "error",
    }  # fmt: skip
    known = {name: value for name, value in wanted.items() if hasattr(torch._dynamo.config, name)}
    stack.enter_context(torch._dynamo.config.patch(**known))
    stack.enter_context(torch.fx.experimental._config.patch(use_duck_shape=False))  # type: ignore[attr-defined]
    return stack


def _cause(error: BaseException | None, kind: type[Exception]) -> Any:
    """The first error of a kind among an error and what it was raised from."""
    while error is not None and not isinstance(error, kind):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return error


def _explanation(error: BaseException) -> str:
    """Torch's explanation of why it cannot read a forward, with the line of the user's code."""
    if "side effects" in str(error):
        changed = sorted({Source(*_parsed(name), name).expression for name in re.findall(r'"(L\[.*?)"', str(error))})
        return f"it changes {', '.join(changed) or 'Python objects'} in each call, and a graph keeps no Python state"
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
    why = next((line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")), "")
    text = ": ".join(filter(None, (lines[0], why)))
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    frames = [frame for frame in getattr(error, "real_stack", None) or () if not _is_of_torch(frame.filename)]
    return f"{text} {place_in(frames[-1].filename, frames[-1].lineno)}" if frames else text


def place_in(filename: str, line: int) -> str:
    """A line of the user's code, as text: "at models.py:44 'y = x + 1'"."""
    code = linecache.getline(filename, line).strip()
    return f"at {Path(filename).name}:{line} '{code}'" if code else f"at {Path(filename).name}:{line}"


def _is_of_torch(filename: str) -> bool:
    return filename.startswith((_TORCH, __file__)) or filename.startswith("<")
