"""The forwards of a model in training and in evaluation, as operations.

torch reads the whole model, with a symbol for the batch. A module that it does not read, or that has so many modules in
it that reading them takes minutes, is run once, and its children are read with the arguments that it gave them; of its
own products only the FLOPs are known. Alike children are read once.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from loka.errors import InputError
from loka.gc import deferred_gc
from loka.graph.capture.captured import CannotCaptureError
from loka.graph.sites.captured_forward import (
    CapturedForward,
    ModuleCall,
    captured_forward,
    description,
    descriptions,
    held_at,
    with_values,
)
from loka.graph.sites.children import ModuleRun, fake_copy, real_copy, run_module, undisturbed
from loka.graph.sites.operations import Operation, Operations, OtherProduct
from loka.graph.sites.reader import Leaf, Reader
from loka.graph.sites.sizes import Sizes, Symbols, UnknownSizeError
from loka.graph.sites.train_eval_diff import depends_on_mode
from loka.model.build_model import BuiltModel
from loka.model.callables import describe_error, place_of
from loka.model.copying import copy_model
from loka.model.inputs import cut_inputs, empty_like, resized_inputs, tensors_in

SAMPLES = 64  # in the largest run on real samples
LOOP = 8  # calls of one module in a forward that reads values, above which it is a loop
READ = 1000  # modules above which a forward is not read: each takes up to ten milliseconds
FIXED = "the batch size is written into the forward: rows follow it only as far as one size shows"
NUMBERS = "the forward reads values: it was run on a few real samples, and other values may call other GEMMs"


@dataclass(frozen=True, slots=True)
class Forwards:
    """What a model does in training and in evaluation, with sizes in one or more runs."""

    training: Operations
    evaluation: Operations
    samples: tuple[int, ...]  # of each run
    from_data: bool
    notes: tuple[str, ...] = ()

    @property
    def modes(self) -> tuple[Operations, ...]:
        """What is done in training, and in evaluation if that is something else."""
        return (self.training,) if self.evaluation is self.training else (self.training, self.evaluation)

    @property
    def called(self) -> frozenset[str]:
        """Modules whose forward runs, in either mode."""
        return frozenset().union(*(mode.called for mode in self.modes))


class _UnlikeRunsError(ValueError):
    """The forwards at different batch sizes call different modules."""


class _FixedBatchError(ValueError):
    """The batch is a number in the graph."""


def forwards_of(built: BuiltModel) -> Forwards:
    """The forwards of a model. The model, its buffers, its hooks and the random state are unchanged.

    Raises InputError where the forward raises.
    """
    usual, few = _unusual_batch(built), tuple(sorted({2, 3, min(built.batch_size, SAMPLES)}))
    sizes = (usual, built.batch_size if usual != built.batch_size else 2 * usual)
    model = _Model(built)
    attempts: tuple[tuple[str, tuple[int, ...], tuple[str, ...]], ...] = (
        ("", sizes, ()),
        ("", (built.batch_size,), (FIXED,)),
        ("fake", sizes, ()),
        ("fake", (built.batch_size,), (FIXED,)),
        ("real", few, (NUMBERS,)),
        ("real", (2, 3), (NUMBERS,)),
        ("real", (built.batch_size,), (NUMBERS,)),
    )
    first: Exception | None = None
    last: Exception | None = None
    for runs_on, samples, notes in attempts:
        if runs_on == "fake" and _needs_values(first):
            continue
        try:
            with deferred_gc():  # graphs are many small objects, none of them garbage yet
                return model.forwards(runs_on, samples, notes)
        except CannotCaptureError:
            continue  # its children are read next
        except Exception as error:  # noqa: BLE001 - a forward can raise anything; the next attempt may work
            if first is None or (_needs_values(error) and not _needs_values(first)):
                first = error
            last = error
    raise _refusal(built, first, last) from (last or first)


class _Model:
    """A model, with what is known of its modules from one attempt to the next."""

    def __init__(self, built: BuiltModel) -> None:
        self.built = built
        on_meta = any(t.is_meta for t in (*built.module.parameters(), *built.module.buffers()))
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True) if on_meta else None
        self.modules = (
            copy_model(built.module, lambda tensor: tensor) if self.fakes is None else fake_copy(built, self.fakes)
        )
        # Modules whose forwards cannot be read, in some number of runs, with the reason.
        self.unread: dict[tuple[str, int], CannotCaptureError] = {}
        self.known: dict[Any, CapturedForward] = {}
        self.by_sizes: set[Any] = set()  # keys in `known` that have to be of exact sizes
        self.results: dict[Any, Tensor] = {}  # of alike calls of children on fake tensors

    def forwards(self, runs_on: str, samples: tuple[int, ...], notes: tuple[str, ...]) -> Forwards:
        """The forwards on runs of some numbers of samples, on no, "fake" or "real" tensors."""
        if not runs_on and len(self.modules) > READ:
            raise CannotCaptureError(f"it has more than {READ} modules")
        readings = [_Reading(self, runs_on, samples, training=True)]
        made = [readings[0].operations()]
        if readings[0].asks_for_mode or depends_on_mode(self.modules) is not None:
            readings.append(_Reading(self, runs_on, samples, training=False))
            made.append(readings[1].operations())
        unread = {name: why for reading in readings for name, why in reading.unread.items()}
        kinds = dict.fromkeys((type(self.modules[name]).__name__, why) for name, why in unread.items())
        told = (f"the forward of {kind} is not read, but those of its children are: {why}" for kind, why in kinds)
        return Forwards(made[0], made[-1], samples, runs_on == "real", (*notes, *told))


class _Reading:
    """Reads the forwards of one mode."""

    def __init__(self, model: _Model, runs_on: str, samples: tuple[int, ...], training: bool) -> None:
        self.model, self.samples, self.training, self.real = model, samples, training, runs_on == "real"
        self.reader = Reader(model.modules, len(samples))
        self.asks_for_mode = False
        self.unread: dict[str, str] = {}  # modules whose children are read, with the reason
        self._made: dict[int, Operation] = {}  # of tensors in the first run
        self._descriptions: dict[str, Any] = {}
        self._found: dict[tuple[int, ...], CapturedForward | None] = {}  # by the ids of calls, which are kept
        self._kept: list[ModuleRun] = []  # whose tensors' ids are names
        self._mode: FakeTensorMode | None = None
        self._running: dict[str, nn.Module] | None = None
        if runs_on:
            self._mode = None if self.real else FakeTensorMode(allow_non_fake_inputs=True)
            self._running = real_copy(model.built) if self._mode is None else fake_copy(model.built, self._mode)
            for name, module in self._running.items():
                for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                    held = self.reader.held(getattr(model.modules[name], key, None))
                    if held is not None:
                        self._made.setdefault(id(tensor), held)

    def operations(self) -> Operations:
        """What the model does."""
        for modules in (self.model.modules, self._running or {}):
            if modules:
                modules[""].train(self.training)
        calls = [self._of_model(size) for size in self.samples]
        for tensor in tensors_in((calls[0].args, dict(calls[0].kwargs))):
            self._made.setdefault(id(tensor), Operation("input"))
        with undisturbed():
            outputs = self._read("", "", calls)
        return self.reader.operations([each for each in outputs if each is not None])

    def _of_model(self, size: int) -> ModuleCall:
        built = self.model.built
        if self.real:
            args, kwargs = cut_inputs((built.args, built.kwargs), built.batch_size, size)
        else:
            args, kwargs = resized_inputs((built.args, built.kwargs), built.batch_size, size, self._example)
        return ModuleCall("", args, kwargs, self.training)

    def _example(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        mode = self._mode or self.model.fakes
        if tensor.layout != torch.strided:
            return tensor if mode is None else mode.from_tensor(tensor, static_shapes=True)
        if mode is None:
            return empty_like(tensor, shape)
        with mode:
            return empty_like(tensor, shape)

    def _read(self, name: str, caller: str, calls: Sequence[ModuleCall]) -> tuple[Operation | None, ...]:
        """Reads a module, or else its children; what made the tensors that it returns."""
        forward = self._forward(name, calls)
        if forward is not None:
            return self._read_whole(forward, name, caller, calls)
        if self._running is None:
            raise self.model.unread[name, len(calls)]
        return self._read_children(name, caller, calls, self._running)

    def _forward(self, name: str, calls: Sequence[ModuleCall]) -> CapturedForward | None:
        """The forward of a module; None where it is not read. Calls are kept as long as this reading."""
        key = tuple(map(id, calls))
        if key not in self._found:
            self._found[key] = self._look_up(name, calls)
        return self._found[key]

    def _look_up(self, name: str, calls: Sequence[ModuleCall]) -> CapturedForward | None:
        module, unread, key = self.model.modules[name], self.model.unread, (name, len(calls))
        if key not in unread and sum(1 for _ in module.modules()) > READ:
            unread[key] = CannotCaptureError(f"it has more than {READ} modules")
        if key in unread:
            return None
        try:
            forward = self._captured(name, module, calls)
            if name or forward.outputs:
                return forward
            unread[key] = CannotCaptureError("it returns no tensor")
        except CannotCaptureError as error:
            unread[key] = error
        return None

    def _read_whole(
        self,
        forward: CapturedForward,
        name: str,
        caller: str,
        calls: Sequence[ModuleCall],
        leaf: Leaf | None = None,
    ) -> tuple[Operation | None, ...]:
        module = self.model.modules[name]
        held = [call.arguments(module) for call in calls]
        symbols: Symbols = forward.symbols(held)
        if self.real and self._running is not None and leaf is None:
            symbols = with_values(forward, symbols, self._running[name], held)
        self.asks_for_mode |= forward.asks_for_mode

        def given(node: fx.Node) -> Operation | None:
            source = forward.read.sources[node]
            if source.is_of_module:
                return self.reader.held(held_at(module, source.steps))
            if not source.root:
                return None
            return self._made.get(id(held_at(held[0].get(source.root), source.steps))) or Operation("input")

        made = self.reader.read(forward, symbols, name, caller, given, leaf)
        if not name and len(calls) > 1 and any(self._is_frozen(call.m) for call in self.reader.calls):
            raise _FixedBatchError("the batch has become a number, perhaps in numpy, which sets no condition")
        return made

    def _read_around(
        self, name: str, caller: str, calls: Sequence[ModuleCall], called: Sequence[tuple[ModuleCall, ...]]
    ) -> tuple[Operation | None, ...] | None:
        """Reads a module with the children that are not read as leaves; None where that is not why it is not read."""
        if len(called) > READ:
            return None
        unread = [each for each in called if self._forward(each[0].name, each) is None]
        below = f"{name}." if name else ""
        leaves = {each[0].name.removeprefix(below): each for each in unread}
        if not leaves or len(leaves) < len(unread):  # what a leaf returns is known for one call
            return None
        example, other = (len(calls) - 1, 0) if self.real else (0, -1)
        observed = {path: (each[example].result, each[other].result) for path, each in leaves.items()}
        try:
            forward = captured_forward(self.model.modules[name], calls, example, self.model.fakes, observed)
        except CannotCaptureError:
            return None

        def leaf(path: str, given: Sequence[Operation | None]) -> tuple[Operation | None, ...]:
            tensors = tensors_in((leaves[path][0].args, dict(leaves[path][0].kwargs)))
            if len(tensors) == len(given):
                self._made |= {id(t): made for t, made in zip(tensors, given, strict=True) if made is not None}
            return self._read(leaves[path][0].name, name, leaves[path])

        return self._read_whole(forward, name, caller, calls, leaf) if self._knows_sizes(forward, calls, name) else None

    def _knows_sizes(self, forward: CapturedForward, calls: Sequence[ModuleCall], name: str) -> bool:
        """False where a size comes from values."""
        symbols = forward.symbols([call.arguments(self.model.modules[name]) for call in calls])
        return all(size.node.expr.free_symbols <= symbols.keys() for size in forward.symbolic_sizes)

    def _captured(self, name: str, module: nn.Module, calls: Sequence[ModuleCall]) -> CapturedForward:
        """The forward of a module; of alike children one is read, where sizes decide what it does one for the same."""
        known, example = self.model.known, len(calls) - 1 if self.real else 0
        if self._running is None:
            return captured_forward(module, calls, example, self.model.fakes)
        key = self._described(name), descriptions(calls, exact=False)
        if key in self.model.by_sizes:
            key = self._described(name), descriptions(calls, exact=True)
        if key not in known:
            forward = captured_forward(module, calls, example, self.model.fakes)
            if forward.asks_for_sizes:
                self.model.by_sizes.add(key)
                key = self._described(name), descriptions(calls, exact=True)
            known[key] = forward
        return known[key]

    def _leave_loops(self, counts: Counter[str], called: Iterable[str]) -> None:
        """Children with a loop over values, of which torch reads each step, for seconds, are not read as a whole."""
        for name in called:
            inside = [count for module, count in counts.items() if module.startswith(f"{name}.")]
            if max(inside, default=0) > LOOP * counts[name]:
                why = CannotCaptureError("it has a loop over values")
                self.model.unread |= {(name, runs): why for runs in (1, 2, 3)}

    def _described(self, name: str) -> Any:
        if name not in self._descriptions:
            self._descriptions[name] = description(self.model.modules[name])
        return self._descriptions[name]

    def _is_frozen(self, rows: Sizes) -> bool:
        return not self.real and len(set(rows)) == 1 and rows[0] % self.samples[0] == 0

    def _read_children(
        self, name: str, caller: str, calls: Sequence[ModuleCall], running: Mapping[str, nn.Module]
    ) -> tuple[Operation | None, ...]:
        self.reader.has_gaps = True
        runs = [run_module(running, call, self._mode, self.model.results, self._described) for call in calls]
        self._kept += runs
        if self.training and not name and not tensors_in(runs[0].result):
            raise TypeError(
                f"it returned {reprlib.repr(runs[0].result)}, from which nothing can be trained; return tensors"
            )
        if self.real:
            self._leave_loops(runs[-1].counts, {call.name for call in runs[-1].calls})
        if len({tuple(call.name for call in run.calls) for run in runs}) > 1:
            raise _UnlikeRunsError(f"the forward calls other modules at batch sizes of {self.samples}")
        called = list(zip(*(run.calls for run in runs), strict=True))
        around = self._read_around(name, caller, calls, called)
        if around is not None:
            return around
        self.unread[name] = str(self.model.unread[name, len(calls)])
        self.reader.called.add(name)
        for each in called:
            outputs = self._read(each[0].name, name, each)
            results = tensors_in(each[0].result)
            if len(results) != len(outputs):
                outputs = (Operation("forward"),) * len(results)
            for tensor, made in zip(results, outputs, strict=True):
                if made is not None:
                    self._made[id(tensor)] = made
                    if id(tensor) in runs[0].reads:
                        made.children.append(Operation("forward", (made,), owner=name))
        own = tuple(run.flops for run in runs)
        if any(own):
            self.reader.others.append(OtherProduct(f"forward of {type(self.model.modules[name]).__name__}", name, own))
        return tuple(self._made.get(id(tensor)) for tensor in tensors_in(runs[0].result))


def _unusual_batch(built: BuiltModel) -> int:
    """A prime at or just above the batch size that divides no dimension of a parameter, nor another of the inputs.

    So the batch cannot be confused with another size.
    """
    taken = set[int]()
    for tensor in (*built.module.parameters(), *built.module.buffers()):
        taken.update(tensor.shape)
    for tensor in tensors_in((built.args, built.kwargs)):
        taken.update(tensor.shape[1:])
    taken.discard(0)
    size = max(built.batch_size, 2)
    while any(size % each == 0 for each in range(2, isqrt(size) + 1)) or any(each % size == 0 for each in taken):
        size += 1
    return size


def _needs_values(error: Exception | None) -> TypeGuard[Exception]:
    """True if a forward failed for want of values, which fake tensors do not have."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # takes a quarter of a second

    kinds = DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException
    return isinstance(error, (*kinds, GuardOnDataDependentSymNode, UnknownSizeError))


def _refusal(built: BuiltModel, first: Exception | None, last: Exception | None) -> InputError:
    kind = type(built.module).__name__
    if _needs_values(first):
        where = f" at {place}" if (place := place_of(first)) else ""
        return InputError(
            f"model: the forward of {kind} reads the value of a tensor{where}, which hides its GEMMs, "
            f"and running it on real samples failed too ({describe_error(last or first)}); take that branch "
            f"out of the forward, or decide it in the factory"
        )
    error = last or first
    return InputError(
        f"model: the forward of {kind} raised {describe_error(error) if error else 'an error'}; make "
        f"model(*inputs({built.batch_size})) work first"
    )
