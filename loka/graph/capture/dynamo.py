"""Torch's own capture of a forward: one torch-level graph, with everything that it depends on.

Dynamo, the reader of `torch.compile`, hands a backend the graph that it has read from Python; the backend here keeps it
and computes nothing. What is left outside is told: where each placeholder comes from, which plain values were read, and
on which conditions on sizes Python decided. Imports only torch and the standard library beside LoKA's errors, as a
training machine captures, too.

The frame that Dynamo compiles is a function of this module, made anew for each capture: the user's functions are
inlined into it, so that their own caches, recompile limits and observed sizes stay as they are.
"""

from __future__ import annotations

import builtins
import contextlib
import operator
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from loka.graph.capture.arguments import Arguments, bound_arguments
from loka.graph.capture.captured import (
    CannotCaptureError,
    Captured,
    Condition,
    Read,
    is_of_torch,
    map_tree,
    place_in,
)
from loka.graph.capture.leaves import FormNeededError, Leaves, is_call, leaves_of
from loka.graph.capture.sources import Source, parsed
from loka.graph.capture.undisturbed import left_as_it_was

_LONGEST = 300  # characters quoted of an explanation of torch's
_SYMBOL = re.compile(r"\b[suz]f?\d+\b")
_NUMBER_FIRST = re.compile(r"^(-?\d+) == ([^=<>]+)$")  # as sympy prints an equation
_SIZE = re.compile(r"<([^<>]*)>")  # Dynamo's name of a size, in the text of a condition
_DYNAMO = os.path.join("torch", "_dynamo", "")
_DECOMPOSITIONS = os.path.join("torch", "_decomp", "")
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a tensor
_TRANSPOSES: dict[Any, str] = {  # what torch 2.14 reads instead of the attribute of a tensor
    torch.ops.aten.numpy_T: "T",
    torch.ops.aten.mT: "mT",
    torch.ops.aten.matrix_H: "H",
    torch.ops.aten.mH: "mH",
}
_NOTHING = object()  # no result was asked for


@dataclass(slots=True)
class _Kept:
    """What the backend keeps of one compilation."""

    has_result: bool  # the forward's result is asked for
    module: fx.GraphModule | None = None
    sources: dict[fx.Node, str] = field(default_factory=dict)
    reads: tuple[tuple[str, str], ...] = ()
    conditions: tuple[tuple[str, str], ...] = ()
    assigned: dict[str, tuple[str, ...]] = field(default_factory=dict)  # attributes, by Dynamo's name of the object


class _Read(Exception):  # noqa: N818 - ends a compilation whose result nobody needs
    """The graph has been kept."""


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    leaves: Collection[str] = (),
    observed: Mapping[str, tuple[Any, Any]] | None = None,
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
        observed: What leaves returned in two calls with other numbers of rows, the first with these arguments; for
            leaves that fake tensors cannot run, as they read values.
        symbolic: Sizes of the arguments' tensors are symbols wherever the forward allows. Otherwise those dimensions
            are that `torch._dynamo.mark_dynamic` has marked.
        hooks: Read the module's own hooks, too.
        result: Find what the forward returns. It must not change anything but tensors then.

    Raises:
        CannotCaptureError: torch cannot read the forward as one graph, or Dynamo is off.
    """
    kept = _Kept(result)
    bound = bound_arguments(module, args, dict(kwargs or {}))
    with left_as_it_was(module), _no_new_hooks(module, bound), leaves_of(module, leaves, observed or {}) as stubs:
        while True:
            stubs.install()
            try:
                made = _compile(module, bound, kept, symbolic, hooks)
                break
            except FormNeededError as needed:
                stubs.forms[needed.path] = needed.form
        return _captured(module, bound, kept, stubs, made)


@contextlib.contextmanager
def _no_new_hooks(module: nn.Module, bound: Arguments) -> Iterator[None]:
    """Refuses a forward that registers hooks on Parameters and arguments: Dynamo does so itself, beside the graph."""
    named: list[tuple[str, torch.Tensor]] = [(f"self.{name}", each) for name, each in module.named_parameters()]
    named += [(source.expression, tensor) for source, tensor in bound.tensors()]
    held = [(*each, kind, set(getattr(each[1], kind) or ())) for each in named for kind in _HOOKS]
    yield
    hooked = []
    for name, tensor, kind, before in held:
        hooks = getattr(tensor, kind) or {}
        for key in hooks.keys() - before:
            del hooks[key]
            hooked.append(name)
    if hooked:
        raise CannotCaptureError(f"it registers a hook on the gradient of {hooked[0]} in each call")


def _whole(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return self(*args, **kwargs)


def _forward(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return self.forward(*args, **kwargs)


_KEPT: ContextVar[_Kept] = ContextVar("kept")


def _keep(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
    """The backend: keeps a graph, and what Dynamo knows during the compilation alone.

    One function for all captures, as Dynamo remembers each backend that it has met, and whatever that holds.
    """
    kept, context = _KEPT.get(), torch._guards.TracingContext.get()
    kept.module = graph
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            source = getattr(node.meta.get("grapharg"), "source", None)
            kept.sources[node] = _name_of(source)
    kept.reads = tuple((each.name, each.create_fn_name()) for each in context.guards_context.dynamo_guards)
    kept.conditions = _conditions(context.fake_mode.shape_env) if context.fake_mode is not None else ()
    output = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output
    kept.assigned = _assigned(output.side_effects.store_attr_mutations)
    if not kept.has_result:
        raise _Read
    # What was compiled runs once: nothing has to be guarded, and building, checking and timing guards takes as long as
    # reading a small forward.
    context.guards_context.dynamo_guards.inner.clear()
    output.skip_guards_check = True
    outputs = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    values = tuple(each.meta["example_value"] if isinstance(each, fx.Node) else each for each in outputs)
    return lambda *_: values


def _assigned(changes: dict[Any, dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    """The attributes that a forward sets, by Dynamo's name of their object.

    What is set to the value that was read from it, as by `self.cache = self.cache`, does not change, and is taken out.
    """
    existing = torch._dynamo.variables.base.AttributeMutationExisting  # unlike what the forward has made
    assigned = {}
    for changed, values in [each for each in changes.items() if isinstance(each[0].mutation_type, existing)]:
        for name, value in list(values.items()):
            if value.source == torch._dynamo.source.AttrSource(changed.source, name):
                del values[name]
        if values:
            assigned[_name_of(changed.source)] = tuple(values)
        else:
            del changes[changed]
    return assigned


def _compile(module: nn.Module, bound: Arguments, kept: _Kept, symbolic: bool, hooks: bool) -> Any:
    """Runs Dynamo; the forward's result with fake tensors, `_NOTHING` where it is not asked for."""
    if torch._dynamo.config.disable:
        raise CannotCaptureError("torch's Dynamo is off (TORCHDYNAMO_DISABLE, or torch._dynamo.config.disable)")
    entry = _whole if hooks else _forward
    # A copy of the code with globals of its own, in which Dynamo keeps what it imports: one capture knows nothing of
    # another.
    own = FunctionType(entry.__code__.replace(), {"__name__": __name__, "__builtins__": builtins}, entry.__name__)
    # What torch.compile calls, which users replace to keep their model from being compiled.
    compiled = torch._dynamo.optimize(_keep, nopython=True, dynamic=True if symbolic else None)(own)
    token = _KEPT.set(kept)
    try:
        made = compiled(module, bound.args, bound.kwargs)
    except Exception as error:  # Dynamo and the user's code can raise anything
        needed = _cause(error, FormNeededError)
        if needed is not None:
            raise needed from None
        if _cause(error, _Read) is not None:
            return _NOTHING
        cannot = CannotCaptureError(_explanation(error, kept.assigned))
        cannot.lines = _lines(error)
        raise cannot from error
    finally:
        _KEPT.reset(token)
    return made


def _name_of(source: Any) -> str:
    """Dynamo's name of a source; a method before torch 2.12."""
    if source is None:
        return ""
    name = source.name
    return str(name() if callable(name) else name)


def _conditions(env: Any) -> tuple[tuple[str, str], ...]:
    """The conditions on sizes by which Python decided, with Dynamo's names for the sizes, each with the user's line.

    What torch's operations check of their operands is no such condition: a graph has the same operations.
    """
    if env is None:
        return ()
    from sympy import And  # type: ignore[import-untyped]  # which torch itself imports as late
    from torch.utils._sympy.printers import PythonPrinter

    printed = PythonPrinter()
    names = {str(symbol): _name_of(sources[0]) for symbol, sources in env.var_to_sources.items() if sources}
    decided = [each for each in env.guards if _is_of_python(each)]
    parts = [(part, each.sloc) for each in decided for part in sorted(And.make_args(each.expr), key=str)]
    known = [(printed.doprint(part), _place(location)) for part, location in parts]
    known = [(_NUMBER_FIRST.sub(r"\2 == \1", text), place) for text, place in known]
    known = [(text, place) for text, place in known if set(_SYMBOL.findall(text)) <= names.keys()]
    return tuple((_SYMBOL.sub(lambda found: f"<{names[found[0]]}>", text), place) for text, place in known)


def _is_of_python(guard: Any) -> bool:
    """True where Dynamo asked for a size to go on in Python.

    In `run_node` Python's operators ask whether shapes are equal, torch's operations whether sizes are large enough,
    and what torch's own functions call, whether they fit. How many pieces a split has is what Python goes on with.
    """
    frame = guard.sloc.framework_loc
    file, function = getattr(frame, "filename", _DYNAMO), getattr(frame, "name", "")
    if function == "split" and _DECOMPOSITIONS in file:
        return True
    is_of_operator = getattr(guard.expr, "rel_op", "==") == "==" and not _is_in_torch(guard.sloc)
    return _DYNAMO in file and (function != "run_node" or is_of_operator)


def _is_in_torch(location: Any) -> bool:
    """True if a line is one of torch's own files, named from torch's folder on; those of Dynamo's stand for Python."""
    _, _, rest = (location.maybe_user_loc or "").partition("  # ")
    file = rest.partition(":")[0]
    return bool(file) and not file.startswith("_dynamo") and (Path(torch.__file__).parent / file).is_file()


def _place(location: Any) -> str:
    """The user's line in a location of torch's, "code  # file:line in function (...)", as text."""
    code, _, rest = (location.maybe_user_loc or "").partition("  # ")
    return f"at {os.path.basename(rest.partition(' in ')[0])} '{code.strip()}'" if rest else ""


def _captured(module: nn.Module, bound: Arguments, kept: _Kept, leaves: Leaves, made: Any) -> Captured:
    if kept.module is None:
        raise CannotCaptureError(f"the forward of {type(module).__name__} does nothing that torch could read")
    for part in kept.module.modules():  # with the bodies of checkpoints
        if isinstance(part, fx.GraphModule):
            _spell_alike(part.graph)
    graph = kept.module.graph
    sources = {node: bound.source(name) for node, name in kept.sources.items()}
    outputs = next(node for node in graph.nodes if node.op == "output").args[0]
    for node in graph.nodes:
        around = (key.partition("@")[0] for key in node.meta.get("nn_module_stack") or ())  # "@1": its second call
        node.meta["modules"] = tuple(bound.paths[each] for each in around if each in bound.paths)
    for node in list(graph.nodes):
        if is_call(node):
            leaves.restore(graph, node)
    constants = {n.target: getattr(kept.module, n.target) for n in graph.nodes if n.op == "get_attr"}
    reads = tuple(dict.fromkeys(Read(bound.source(name), kind) for name, kind in kept.reads if name))
    texts = [(_SIZE.sub(lambda size: bound.source(size[1]).expression, text), place) for text, place in kept.conditions]
    texts += [(text, "") for node, source in sources.items() for text in _single_sizes(node, source)]
    conditions = tuple(Condition(text, place) for text, place in dict.fromkeys(texts))
    values: dict[int, Any] = {id(value): source for source, value in bound.tensors()}
    values |= {id(each.meta["example_value"]): each for each in outputs if isinstance(each, fx.Node)}
    result = None if made is _NOTHING else map_tree(made, lambda leaf: values.get(id(leaf), leaf))
    return Captured(graph, constants, sources, reads, conditions, result)


def _spell_alike(graph: fx.Graph) -> None:
    """Gives nodes that torch's versions spell differently the one form that everything here knows."""
    for node in graph.nodes:
        if node.op == "call_method" and node.target == "__abs__":  # of the builtin, before torch 2.12
            node.op, node.target = "call_function", operator.abs
        elif node.target in _TRANSPOSES:
            node.target, node.args = getattr, (*node.args, _TRANSPOSES[node.target])


def _single_sizes(node: fx.Node, source: Source) -> Iterator[str]:
    """Conditions on sizes of 0 and 1, which are never symbols: whatever read them has a constant."""
    value = node.meta.get("example_value")
    if source.root in ("", "self") or not isinstance(value, torch.Tensor):
        return
    for dim, size in enumerate(value.shape):
        if isinstance(size, int) and size in (0, 1):
            yield f"{source.expression}.shape[{dim}] == {size}"


def _cause(error: BaseException | None, kind: type[Exception]) -> Any:
    """The first error of a kind among an error and what it was raised from."""
    while error is not None and not isinstance(error, kind):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return error


def _explanation(error: BaseException, assigned: Mapping[str, tuple[str, ...]]) -> str:
    """Torch's explanation of why it cannot read a forward, with the line of the user's code."""
    if "side effects" in str(error):
        changed = set()
        for name in re.findall(r'"(L\[.*?)"', str(error)):
            of = Source(*parsed(name), name).expression
            changed |= {f"{of}.{attribute}" for attribute in assigned.get(name, ())} or {of}
        what = ", ".join(sorted(changed)) or "Python objects"
        return f"it changes {what} in each call, and a graph keeps no Python state"
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
    why = next((line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")), "")
    text = ": ".join(filter(None, (lines[0], why)))
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    places = _lines(error)
    return f"{text} {place_in(*places[-1])}" if places else text


def _lines(error: BaseException) -> tuple[tuple[str, int], ...]:
    stack = getattr(error, "real_stack", None) or ()
    return tuple((frame.filename, frame.lineno) for frame in stack if not is_of_torch(frame.filename))
