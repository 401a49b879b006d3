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

from loka.graph.capture.undisturbed import unchanged
from loka.graph.equivalence import with_forward
from loka.graph.expression import Call, local, method
from loka.graph.ir import ForwardIR, Statement
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
    def given(self) -> dict[str, Any]:
        """The arguments by name, without those that have their defaults."""
        names = (argument.name for argument in self.function._schema.arguments)
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    @property
    def read(self) -> tuple[Tensor, ...]:
        """The tensors among the arguments, in order."""
        return tuple(tensors_in((self.args, self.kwargs)))

    @property
    def made(self) -> tuple[Tensor, ...]:
        """The tensors of the result, in order."""
        return tuple(tensors_in(self.result))

    @property
    def changed(self) -> tuple[Tensor, ...]:
        """The tensors that the operation changes in place, in order."""
        schema = self.function._schema.arguments
        given = [*zip(schema, self.args, strict=False), *((each, self.kwargs.get(each.name)) for each in schema)]
        writes = [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]
        return tuple(tensors_in(writes))


@dataclass(slots=True)
class Run:
    """One run of a forward; its tensors are kept alive, so that their ids stay theirs."""

    arguments: dict[str, object] = field(default_factory=dict)
    calls: list[AtenCall] = field(default_factory=list)
    made: dict[int, object] = field(default_factory=dict)  # by place, what each statement returned
    tensors: dict[str, Tensor] = field(default_factory=dict)  # Parameters and buffers, by name


def recorded(
    forward: ForwardIR,
    examples: Examples,
    copied: Callable[[], nn.Module],
    as_written: Collection[str] = (),
) -> tuple[Run, ...]:
    """A run for each batch size of the examples, in training, without gradients; () where the operations differ.

    Changes in place are recorded as they are: see `out_of_place`.

    `copied` makes a copy of the owner. The targets in `as_written` are tensors of their own, whatever they are made of.
    """
    calls = {call.batch: call for call in reversed(examples.calls)}
    steps = tuple(_marked(forward.statements, as_written))
    marked = replace(forward, statements=steps, guards=())
    runs = tuple(_recorded(marked, calls[batch], copied()) for batch in sorted(calls))
    return runs if len(runs) > 1 and all(_names(run) == _names(runs[0]) for run in runs) else ()


def out_of_place(forward: ForwardIR, runs: Sequence[Run]) -> Statement | None:
    """Makes changes in place within one statement out of place, as torch's own functions have.

    Returns a statement with another change, which the tensor's other readers may see; None without one.
    """
    modules = {place for place, step in enumerate(forward.statements) if step.op == "module"}
    changed = next((place for run in runs if (place := _out_of_place(run, modules)) is not None), None)
    return None if changed is None else forward.statements[changed]


def _out_of_place(run: Run, modules: Collection[int]) -> int | None:
    """Makes each change of a tensor that its own statement made one that makes a new tensor; the place of another.

    The calls of a module (at the places in `modules`) stay: it may change its own tensors. So do those of a statement
    that makes a tensor and fills it with random numbers.
    """
    standing: dict[int, Tensor] = {}  # for tensors that were changed, by id
    known = {_storage(each) for each in run.tensors.values()}
    drawn = {call.place for call in run.calls if torch.Tag.nondeterministic_seeded in call.function.tags}
    calls: list[AtenCall] = []
    own: dict[int, set[int]] = {}  # ids of the tensors that the statement at hand made, by their storage
    place = -1

    def put(value: Any) -> Any:
        return standing.get(id(value), value) if isinstance(value, Tensor) else value

    for call in run.calls:
        own, place = (own, place) if call.place == place else ({}, call.place)
        changed, read = call.changed, {_storage(each) for each in call.read}
        if any(_storage(each) not in own and not (place in modules and _storage(each) in known) for each in changed):
            return place
        for each in call.made:
            if _storage(each) in own or _storage(each) not in read:
                own.setdefault(_storage(each), set()).add(id(each))
        args, kwargs, result = (tree_map(put, each) for each in (call.args, call.kwargs, call.result))
        function = call.function
        if changed and place not in modules and place not in drawn:
            old, function = changed[0], _twin(call)
            if len(changed) > 1 or old is not call.args[0] or call.result is not old or function is None:
                return place
            if own[_storage(old)] != {id(old)}:  # a view of it may be read
                return place
            result = standing[id(old)] = torch.empty_like(old)
        calls.append(AtenCall(place, function, args, kwargs, result))
    run.calls = calls
    run.made = {place: tree_map(put, made) for place, made in run.made.items()}
    return None


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
    run.tensors = dict((*owner.named_parameters(), *owner.named_buffers()))
    shown = with_forward(owner, forward)
    shown.forward.__func__.__globals__[_RECORDER] = recorder  # type: ignore[attr-defined]
    shown._forward_hooks = OrderedDict()
    args, kwargs = copy_tree(call.args), copy_tree(call.kwargs)
    bound = inspect.signature(shown.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    run.arguments = dict(bound.arguments)
    # The order of products in an einsum must not depend on the packages that a machine has.
    ordered = torch.backends.opt_einsum.flags(enabled=False)
    with unchanged(owner), torch.no_grad(), ordered:
        shown.train(True)
        with recorder:
            shown.forward(*args, **kwargs)
    run.calls, run.made = recorder.calls, recorder.made
    return run


def _marked(statements: Sequence[Statement], as_written: Collection[str]) -> Iterator[Statement]:
    """The statements, each between two calls of the recorder."""
    for place, step in enumerate(statements):
        yield Statement("_", "mark", Call(f"{_RECORDER}.begin", (place,)))
        target = "loka_unread" if step.target == "_" else step.target
        value = method(step.value, "clone") if target in as_written else step.value
        value = Call(f"{_RECORDER}.own", (value,)) if step.op == "module" else value
        yield replace(step, target=target, value=value)
        yield Statement("_", "mark", Call(f"{_RECORDER}.end", (place, local(target))))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the calls below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.place = -1
        self.calls: list[AtenCall] = []
        self.made: dict[int, object] = {}

    def begin(self, place: int) -> None:
        """The statement at this place begins."""
        self.place = place

    def end(self, place: int, value: object) -> None:
        """The statement at this place has made a value."""
        self.made[place] = value

    def own(self, value: Any) -> Any:
        """What a module returned, as tensors of its own: it may have changed, or passed on, what it was given."""
        calls = [call for call in self.calls if call.place == self.place]
        changed = {_storage(old) for call in calls for old in call.changed}
        made = {id(each) for call in calls for each in call.made}

        def copied(each: Any) -> Any:
            passed_on = isinstance(each, Tensor) and (id(each) not in made or _storage(each) in changed)
            return each.clone() if passed_on else each

        return tree_map(copied, value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append(AtenCall(self.place, func, args, kwargs or {}, result))
        return result


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in a value of tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
