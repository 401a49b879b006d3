"""The fingerprint of a generated forward: the graph that torch reads from the module's own forward, as normal text.

It is made when a plan is, and made again of the live module by `apply` and `verify`, on fake tensors that are like the
planned arguments. Source, closures, globals, configuration, the environment and the state of the process are in it as
far as the forward depends on them. The text knows nothing of devices, names of symbols, values of weights, and versions
of torch. Imports only torch and the standard library beside LoKA's errors.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from loka.graph.call_inputs import described, described_results, inputs_of, results_of
from loka.graph.capture.captured import CannotCaptureError, Captured, line_of, place_in
from loka.graph.capture.dynamo import capture
from loka.graph.capture.leaves import observed_results
from loka.graph.fake_module import FakeModules, device_of, floating_dtype

_SYMBOL = re.compile(r"\b[suz]f?\d+\b")
_SAME_NAMES = {"truediv": "div", "imul": "mul_", "iadd": "add_", "isub": "sub_", "itruediv": "div_"}
_NO_WRITES = frozenset({"and_", "or_", "not_", "is_", "requires_grad_"})
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_LONGEST = 160  # characters of a line in a message


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One way in which a model calls an owner, and what its forward then runs."""

    inputs: str  # a literal: the arguments by `described`
    training: tuple[str, ...]
    evaluation: tuple[str, ...] = ()  # () if the same
    results: tuple[tuple[str, str], ...] = ()  # of called children that run on no fake tensors: literals, as `inputs`


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a module's own forward was when its generated one was made."""

    calls: tuple[PlannedCall, ...]
    dtype: str = ""  # of all floating-point tensors of the module: "float32"; "" if they have several


@dataclass(frozen=True, slots=True)
class _Line:
    text: str
    place: str = ""  # "at models.py:44 'y = x + 1'"

    def __str__(self) -> str:
        return self.text


def fingerprint(
    module: nn.Module,
    inlined: Collection[str],
    calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
    others: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
) -> Fingerprint:
    """The fingerprint of a module.

    Args:
        module: The owner, as it is when its forward is traced.
        inlined: Children whose forwards are part of the generated one, relative to the module.
        calls: The arguments of its calls at one batch size.
        others: The same at another batch size; sizes that differ are symbols.

    Raises:
        CannotCaptureError: torch cannot read the forward, or an argument cannot be described.
    """
    dtype = floating_dtype(module)
    made: dict[str, PlannedCall] = {}
    for one, other in zip(calls, others, strict=False):
        text = described(one, other)
        if text in made:
            continue
        results: tuple[tuple[str, str], ...] = ()
        try:
            modes = _both_modes(module, inlined, PlannedCall(text, ()), dtype)
        except CannotCaptureError:  # of a called child, perhaps, which may do anything
            children = list(called_children(module, inlined))
            results = described_results(observed_results(module, children, (one, other)))
            modes = _both_modes(module, inlined, PlannedCall(text, (), results=results), dtype)
        training, evaluation = (tuple(map(str, lines)) for lines in modes)
        made[text] = PlannedCall(text, training, evaluation if evaluation != training else (), results)
    return Fingerprint(tuple(made.values()), str(dtype).removeprefix("torch.") if dtype else "")


def changed_forward(
    module: nn.Module, inlined: Collection[str], planned: Fingerprint, shapes: Mapping[str, tuple[int, ...]]
) -> str | None:
    """The first difference between a live module's own forward and the planned one, in words; None without any.

    Args:
        module: The live module; it may be bound, wrapped inside, sharded or without values, and is left as it is.
        inlined: As for `fingerprint`.
        planned: Its fingerprint.
        shapes: Shapes of its Parameters as planned, for those that are in pieces.

    Raises:
        CannotCaptureError: torch cannot read its forward, or not here.
    """
    dtype = getattr(torch, planned.dtype) if planned.dtype else None
    for call in planned.calls:
        texts = (call.training, call.evaluation or call.training)
        found = _difference(_both_modes(module, inlined, call, dtype, shapes), texts)
        if found is not None:
            return found
    return None


def _difference(modes: Sequence[Sequence[_Line]], planned: Sequence[Sequence[str]]) -> str | None:
    for lines, texts in zip(modes, planned, strict=True):
        for place in range(max(len(lines), len(texts))):
            line = lines[place] if place < len(lines) else _Line("nothing more")
            text = texts[place] if place < len(texts) else "nothing more"
            if line.text == text:
                continue
            where = f" {line.place}" if line.place else ""
            return f"its own forward is another{where}: {_short(line.text)}, planned was {_short(text)}"
    return None


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _both_modes(
    module: nn.Module,
    inlined: Collection[str],
    call: PlannedCall,
    dtype: torch.dtype | None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[list[_Line], list[_Line]]:
    """What the forward of a module runs in training and in evaluation."""
    device = device_of(module)

    def lines(training: bool) -> tuple[list[_Line], bool]:
        fakes = FakeModules(device, dtype, shapes)
        fake = fakes.module(module)
        leaves = list(called_children(fake, inlined))
        for child in fake.modules():
            child.training = training
        args, kwargs = inputs_of(call.inputs, fakes)
        observed = {path: results_of(text, fakes) for path, text in call.results}
        found = capture(fake, args, kwargs, leaves=leaves, observed=observed, symbolic=False, result=True)
        known = {name for name, _ in fake.named_parameters(remove_duplicate=False)}
        own = {name for name in known if name.rpartition(".")[0] in ("", *inlined)}
        asks = any(read.source.text.endswith((".training", "['training']")) for read in found.reads)
        return _Text(found, fake, own).lines(), asks

    with _plain_state(device):
        training, asks = lines(training=True)
        return training, lines(training=False)[0] if asks else training


@contextlib.contextmanager
def _plain_state(device: torch.device) -> Iterator[None]:
    """With gradients, and without autocast, modes that watch operations and hooks of all modules."""
    from torch.utils._python_dispatch import _disable_current_modes

    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        for name in _GLOBAL_HOOKS:
            stack.callback(setattr, nn.modules.module, name, getattr(nn.modules.module, name))
            setattr(nn.modules.module, name, OrderedDict())
        for kind in {"cpu", device.type}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


def called_children(module: nn.Module, inlined: Collection[str]) -> Iterator[str]:
    """Paths of the children that the generated forward calls: those that are not inlined, nor hold one that is."""
    inside = {id(module.get_submodule(path)) for path in inlined if _is_there(module, path)}
    around = {path.rpartition(".")[0] for path in inlined}
    around |= {".".join(path.split(".")[:end]) for path in around for end in range(1, path.count(".") + 1)}
    seen: set[int] = set()

    def walk(parent: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in parent._modules.items():
            if child is None or id(child) in seen:
                continue
            seen.add(id(child))
            path = f"{prefix}{name}"
            if id(child) in inside or path in around or type(child).forward is nn.Module.forward:
                yield from walk(child, f"{path}.")
            else:
                yield path

    yield from walk(module, "")


def _is_there(module: nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


class _Text:
    """The text of a captured forward, line by line."""

    def __init__(self, captured: Captured, module: nn.Module, own: Collection[str]) -> None:
        self._captured, self._module, self._own = captured, module, own
        self._names: dict[fx.Node, str] = {}
        self._symbols: dict[str, str] = {}
        graph, constants = captured.graph, captured.constants
        self._constants: dict[fx.Node, Any] = {n: constants[str(n.target)] for n in graph.nodes if n.op == "get_attr"}

    def lines(self) -> list[_Line]:
        """The operations in order, the result, the tensors that are read beside Parameters, the conditions on sizes."""
        graph = self._captured.graph
        body = list(self._body(graph, "v"))
        body.append(_Line(f"return {self._text(self._captured.result)}"))
        body += map(_Line, sorted(self._tensors()))
        return body + [_Line(f"if {each}") for each in sorted(each.text for each in self._captured.conditions)]

    def _body(self, graph: fx.Graph, prefix: str) -> Iterator[_Line]:
        dead = _dead(graph)
        writes = any(_writes(node) for node in graph.nodes)
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr", "output") or node in dead or _size_of(node) is not None:
                continue
            self._names[node] = name = f"{prefix}{len(self._names)}"
            yield _Line(f"{name} = {self._call(node, writes)}", _place_of(node))

    def _call(self, node: fx.Node, writes: bool) -> str:
        given = [self._text(arg) for arg in node.args]
        given += [f"{key}={self._text(arg)}" for key, arg in sorted(node.kwargs.items())]
        if node.op != "call_module":
            return f"{_function(node)}({', '.join(given)})"
        # What writes in place depends on whether a child makes a new tensor, which its type says.
        kind = f" <{type(self._module.get_submodule(str(node.target))).__qualname__}>" if writes else ""
        return f"self.{node.target}{kind}({', '.join(given)}) -> {_shapes(node.meta.get('example_value'))}"

    def _tensors(self) -> Iterator[str]:
        for node, source in self._captured.sources.items():
            value = node.meta.get("example_value")
            if not source.text:
                raise CannotCaptureError(f"it reads a value that is neither the module's nor an argument ({node.name})")
            if isinstance(value, Tensor) and source.root in ("", "self") and source.path not in self._own:
                yield f"{source.expression}: {_dtype(value)} {_shapes(value)}"

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._operand(value)
        if hasattr(value, "expression"):
            return str(value.expression)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return _SYMBOL.sub(lambda found: self._symbol(found[0]), str(value.node.expr))
        if isinstance(value, torch.device):
            return "device"
        if isinstance(value, slice):
            return f"slice({self._text(value.start)}, {self._text(value.stop)}, {self._text(value.step)})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self._text(item)}' for key, item in value.items())}}}"
        if isinstance(value, list | tuple):
            kind = type(value).__qualname__ if hasattr(value, "_fields") else ""
            return f"{kind}[{', '.join(map(self._text, value))}]"
        if isinstance(value, Tensor):
            return _constant(value)
        if isinstance(value, bool | int | float | complex | str | bytes | None | torch.dtype | torch.layout) or (
            value is ... or isinstance(value, torch.memory_format | range)
        ):
            return repr(value)
        if callable(value) and hasattr(value, "__name__"):
            return _named(value)
        if hasattr(value, "__dataclass_fields__"):
            held = ", ".join(f"{name}={self._text(getattr(value, name))}" for name in value.__dataclass_fields__)
            return f"{type(value).__qualname__}({held})"
        raise CannotCaptureError(f"its graph holds a {type(value).__qualname__}, which has no text")

    def _operand(self, node: fx.Node) -> str:
        size = _size_of(node)
        if size is not None:
            return self._text(size)
        if node in self._names:
            return self._names[node]
        if node.op == "get_attr":
            constant = self._constants[node]
            return self._block(constant) if isinstance(constant, fx.GraphModule) else _constant(constant)
        source = self._captured.sources.get(node)
        return source.expression if source is not None else node.name

    def _block(self, block: fx.GraphModule) -> str:
        """A part of the graph that an operator runs, such as a checkpoint's."""
        inputs = [node for node in block.graph.nodes if node.op == "placeholder"]
        start = len(self._names)
        self._names |= {node: f"b{start + number}" for number, node in enumerate(inputs)}
        self._constants |= {n: getattr(block, str(n.target)) for n in block.graph.nodes if n.op == "get_attr"}
        steps = [line.text for line in self._body(block.graph, "b")]
        outputs = [self._text(node.args[0]) for node in block.graph.nodes if node.op == "output"]
        return f"[{'; '.join((*steps, *outputs))}]"

    def _symbol(self, name: str) -> str:
        return self._symbols.setdefault(name, f"n{len(self._symbols)}")


def _dead(graph: fx.Graph) -> set[fx.Node]:
    """Operations that nothing reads and that write nothing."""
    dead: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "call_method") and not _writes(node) and dead.issuperset(node.users):
            dead.add(node)
    return dead


def _writes(node: fx.Node) -> bool:
    """True for an operation in place."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = _function(node)
    in_place = name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES
    return in_place or name in ("setitem", "_set_grad_enabled") or "autocast" in name or (
        node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None)  # fmt: skip


def _function(node: fx.Node) -> str:
    """The name of what a node calls: the same for torch's function, its method and Python's operator."""
    return str(node.target) if node.op == "call_method" else _named(node.target)


def _named(function: Any) -> str:
    home = str(getattr(function, "__module__", None) or "torch")
    name = str(getattr(function, "__name__", function))
    if home.partition(".")[0] in ("torch", "_operator", "builtins", "math"):
        return _SAME_NAMES.get(name, name)
    return str(getattr(function, "__qualname__", function))


def _size_of(node: fx.Node) -> Any:
    """The number that a node stands for; None for all others."""
    value = node.meta.get("example_value")
    if isinstance(value, torch.Size):
        return tuple(value)
    known = isinstance(value, bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool)
    return value if known else None


def _shapes(value: Any) -> str:
    """Shapes of the tensors in a value, "?" for sizes that depend on the batch."""
    if isinstance(value, Tensor):
        return f"[{', '.join(str(size) if type(size) is int else '?' for size in value.shape)}]"
    return f"({', '.join(map(_shapes, value))})" if isinstance(value, list | tuple) else type(value).__name__


def _dtype(value: Tensor) -> str:
    return "float" if value.dtype.is_floating_point else str(value.dtype).removeprefix("torch.")


def _constant(value: Tensor) -> str:
    """A tensor made of plain numbers, by its values."""
    numbers = value.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(numbers.view(torch.uint8).numpy().tobytes()).hexdigest()[:16] if numbers.numel() else ""
    return f"tensor({_dtype(value)} {_shapes(value)} {digest})"


def _place_of(node: fx.Node) -> str:
    """The user's line that a node comes from."""
    line = line_of(node)
    return place_in(*line) if line is not None else ""
