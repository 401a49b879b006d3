"""What a traced forward does in ATen operations, statement by statement, on its examples."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from loka.graph.equivalence import with_forward
from loka.graph.ir import ForwardIR, Ref, RefKind, Statement
from loka.graph.trace.examples import ExampleCall, Examples, copy_tree

_RECORDER = "loka_recorder"


@dataclass(frozen=True, slots=True)
class AtenCall:
    """One call of an ATen operation, by the statement at `place`."""

    place: int
    function: Any  # torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def name(self) -> str:
        """Name without the overload: "addmm"."""
        return str(self.function._schema.name).removeprefix("aten::")

    @property
    def read(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments, in order."""
        return tuple(_tensors((self.args, self.kwargs)))

    @property
    def made(self) -> tuple[Tensor, ...]:
        """The tensors of the result, in order."""
        return tuple(_tensors(self.result))


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor that the statement at `place` changes in place, and the one that stands for it from then on."""

    place: int
    old: Tensor
    new: Tensor


@dataclass(slots=True)
class Run:
    """One run of a forward; its tensors are kept alive, so that their ids stay theirs."""

    arguments: dict[str, object] = field(default_factory=dict)
    calls: list[AtenCall] = field(default_factory=list)
    made: dict[int, object] = field(default_factory=dict)  # by place, what each statement returned
    tensors: dict[str, Tensor] = field(default_factory=dict)  # Parameters and buffers, by name
    changes: list[Change] = field(default_factory=list)


def recorded(
    forward: ForwardIR, examples: Examples, copied: Callable[[], nn.Module], barred: Collection[str] = ()
) -> tuple[Run, ...]:
    """A run for each batch size of the examples, in training, without gradients; () where the operations differ.

    `copied` makes a copy of the owner. The targets in `barred` are tensors of their own, whatever they are made of.
    """
    calls = {call.batch: call for call in reversed(examples.calls)}
    steps = tuple(_marked(forward.statements, barred))
    marked = replace(forward, statements=steps, guards=())
    runs = tuple(_recorded(marked, calls[batch], copied()) for batch in sorted(calls))
    same = len(runs) > 1 and all(_names(run) == _names(runs[0]) for run in runs)
    modules = {place for place, step in enumerate(forward.statements) if step.op == "module"}
    return runs if same and all(_out_of_place(run, modules) for run in runs) else ()


def _out_of_place(run: Run, modules: Collection[int]) -> bool:
    """Makes each change of a tensor of the forward's own one that makes a new tensor; False where that cannot be.

    Others must not read the old tensor, or views of it, any more. What a module changes is its own, and so is what a
    statement makes and fills with random numbers: these are taken as they are.
    """
    standing: dict[int, Tensor] = {}  # for tensors that were changed, by id
    stale: set[int] = set()
    outside = {_storage(each) for each in (*_tensors(run.arguments), *run.tensors.values())}
    alive: dict[int, Tensor] = {}
    calls: list[AtenCall] = []

    def put(value: Any) -> Any:
        return standing.get(id(value), value) if isinstance(value, Tensor) else value

    made = dict(run.made)
    drawn = {call.place for call in run.calls if torch.Tag.nondeterministic_seeded in call.function.tags}
    for place in sorted({*made, *(call.place for call in run.calls)}):
        before = {_storage(each) for each in alive.values()} if place in drawn else set()
        for call in (each for each in run.calls if each.place == place):
            if place not in modules and any(id(each) in stale for each in call.read):
                return False
            args, kwargs = tree_map(put, call.args), tree_map(put, call.kwargs)
            alive |= {id(each): each for each in (*call.read, *call.made)}
            own = place in drawn and isinstance(call.result, Tensor) and _storage(call.result) not in before | outside
            if not call.function._schema.is_mutable or place in modules or own:
                calls.append(replace(call, args=args, kwargs=kwargs, result=tree_map(put, call.result)))
                continue
            old = call.args[0] if call.args else None
            function = _twin(call)
            if not isinstance(old, Tensor) or call.result is not old or function is None or _storage(old) in outside:
                return False
            stale |= {key for key, each in alive.items() if _storage(each) == _storage(old) and each is not old}
            new = torch.empty_like(old)
            run.changes.append(Change(place, put(old), new))
            standing[id(old)] = new
            calls.append(AtenCall(place, function, args, kwargs, new))
        run.made[place] = tree_map(put, made.get(place))
    run.calls = calls
    return True


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)


def _twin(call: AtenCall) -> Any:
    """The operation that makes a new tensor where this one changes its first argument; None where there is none."""
    packet = getattr(torch.ops.aten, call.name.removesuffix("_"), None) if call.name.endswith("_") else None
    return None if packet is None else getattr(packet, call.function._overloadname, None)


def _names(run: Run) -> list[tuple[int, str]]:
    return [(call.place, str(call.function)) for call in run.calls]


def _recorded(forward: ForwardIR, call: ExampleCall, owner: nn.Module) -> Run:
    run, recorder = Run(), _Recorder()
    run.tensors = {name: tensor for name, tensor in (*owner.named_parameters(), *owner.named_buffers())}
    flags = [(child, child.training) for child in owner.modules()]
    shown = with_forward(owner, forward)
    shown.forward.__func__.__globals__[_RECORDER] = recorder  # type: ignore[attr-defined]
    shown._forward_hooks = OrderedDict()
    args, kwargs = copy_tree(call.args), copy_tree(call.kwargs)
    run.arguments = dict(inspect.signature(shown.forward).bind(*args, **kwargs).arguments)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            shown.train(True)
            with recorder:
                shown.forward(*args, **kwargs)
    finally:
        for child, flag in flags:
            child.training = flag
    run.calls, run.made = recorder.calls, recorder.made
    return run


def _marked(statements: Sequence[Statement], barred: Collection[str]) -> Iterator[Statement]:
    """The statements, each between two calls of the recorder."""
    for place, step in enumerate(statements):
        yield Statement("_", "mark", f"{_RECORDER}.begin({place})", ())
        target = "loka_unread" if step.target == "_" else step.target
        yield replace(step, target=target, template=f"({step.template}).clone()" if target in barred else step.template)
        yield Statement("_", "mark", f"{_RECORDER}.end({place}, {{0}})", (Ref(RefKind.LOCAL, target),))


class _Recorder(TorchDispatchMode):
    """Collects the calls below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.place = -1
        self.calls: list[AtenCall] = []
        self.made: dict[int, object] = {}

    def begin(self, place: int) -> None:
        """The statement at this place begins."""
        self.place = place

    def end(self, place: int, value: object) -> None:
        """The statement at this place has made a value."""
        self.made[place] = value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append(AtenCall(self.place, func, args, kwargs or {}, result))
        return result


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in a value of tuples, lists and dicts, in order."""
    yield from _tensors(value)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
