"""Records a training and an evaluation forward of a copy of the model, on fake tensors or on a few real samples."""

from __future__ import annotations

import importlib
import logging
import reprlib
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from loka.gc import deferred_gc
from loka.sites.build_model import BuiltModel
from loka.sites.copying import copy_model
from loka.sites.example_inputs import random_state_kept
from loka.sites.fake_outputs import FakeOutputs
from loka.sites.neighbours import Call, Function, Node, Other
from loka.sites.recorder import Recorder
from loka.sites.symbolic_inputs import BatchShape, Size, cut_inputs, fake_inputs, tensors_in


class SpecialisedError(ValueError):
    """The forward turned the symbolic batch into a number."""


@dataclass(frozen=True)
class Watched:
    """The record of one run of the model. `evaluation` is None if only training was run."""

    training: tuple[Call, ...]
    evaluation: tuple[Call, ...] | None
    others: tuple[Other, ...]
    called: frozenset[str]  # modules whose forward ran, in either mode
    functions: tuple[Function, ...] = ()  # in training
    outputs: tuple[Node, ...] = ()  # results of the model, in either mode
    parameters: Mapping[str, Node] = field(default_factory=dict)  # each Parameter, with its readers in either mode


def watch_fake(built: BuiltModel, batch: int, evaluate: bool, symbolic: bool = False) -> Watched:
    """Run the model on fake tensors, with a fixed batch size or with a symbol of value `batch`.

    Raises:
        SpecialisedError: The symbolic batch became a number.
        Exception: Any exception of the forward.
    """
    _import_apart("torch.fx.experimental.validator")
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    size: Size = _symbol(mode, batch) if symbolic else batch
    fake_outputs = FakeOutputs(mode)
    device = device_of(built)

    def fake_of(tensor: Tensor) -> Tensor:
        return fake_outputs.static(tensor, device if tensor.device.type == "meta" else tensor.device)

    def example(tensor: Tensor, shape: BatchShape) -> Tensor:
        return _fake_input(mode, tensor, shape)

    modules = copy_model(built.module, fake_of)
    args, kwargs = fake_inputs((built.args, built.kwargs), built.batch_size, size, example)
    watched = _watch(modules, args, kwargs, fake_outputs, mode, evaluate)
    if isinstance(size, torch.SymInt) and not size.node.expr.free_symbols:
        raise SpecialisedError("the forward fixes the batch size")
    return watched


def _import_apart(name: str) -> None:
    """Import a module that keeps the frames of its importers for good: in a thread, they hold no model and no inputs.

    A ShapeEnv would import it, and with it torch._dynamo, in the midst of planning.
    """
    if name not in sys.modules:
        thread = threading.Thread(target=importlib.import_module, args=(name,))
        thread.start()
        thread.join()


def watch_real(built: BuiltModel, batch: int, evaluate: bool) -> Watched:
    """Run a real copy of the model on the first samples of the example inputs.

    Raises:
        NotCuttableError: The inputs cannot be cut to `batch` samples.
        Exception: Any exception of the forward.
    """
    args, kwargs = cut_inputs((built.args, built.kwargs), built.batch_size, batch)
    return _watch(copy_model(built.module, _real_copy), args, kwargs, None, None, evaluate)


def unusual_batch(built: BuiltModel) -> int:
    """A size at or just above the batch size that no parameter and no other dimension of the inputs has.

    So the batch cannot be confused with another size that it happens to equal.
    """
    taken = {0, 1}
    for tensor in (*built.module.parameters(), *built.module.buffers()):
        taken.update(tensor.shape)
    for tensor in tensors_in((built.args, built.kwargs)):
        taken.update(tensor.shape[1:])
    size = built.batch_size
    while size in taken:
        size += 1
    return size


def device_of(built: BuiltModel) -> torch.device:
    """The device of the model's inputs, where it runs."""
    return next((t.device for t in tensors_in((built.args, built.kwargs))), torch.device("cpu"))


def _watch(
    modules: dict[str, nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fake_outputs: FakeOutputs | None,
    mode: FakeTensorMode | None,
    evaluate: bool,
) -> Watched:
    model = modules[""]
    names = {id(p): n for n, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    buffers = {id(b): n for n, b in model.named_buffers()}
    _unwrap_compiled(modules)
    recorder = Recorder(names, buffers, fake_outputs, _run.__code__)
    for name, module in modules.items():
        if not isinstance(module, torch.jit.ScriptModule):
            recorder.watch(name, module)
    recorder.add_inputs(tensors_in((args, kwargs)))
    training: tuple[Call, ...] = ()
    evaluation: tuple[Call, ...] | None = None
    made: list[Tensor] = []
    with mode or nullcontext():
        model.train()
        with torch.enable_grad():
            made += tensors_in(_run(model, args, kwargs, recorder))
        training, others = tuple(recorder.calls), tuple(recorder.others)
        functions = tuple(recorder.functions)
        if evaluate:
            recorder.calls.clear()
            model.eval()
            with torch.no_grad():
                made += tensors_in(_run(model, args, kwargs, recorder))
            evaluation = tuple(recorder.calls)
    outputs = tuple(node for tensor in made if (node := recorder.node_of(tensor)) is not None)
    named = model.named_parameters(remove_duplicate=False)
    parameters = {name: node for name, tensor in named if (node := recorder.node_of(tensor)) is not None}
    called = frozenset(recorder.called)
    return Watched(training, evaluation, others, called, functions, outputs, parameters)


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Recorder) -> Any:
    """The frame at which the search for the model's own line ends."""
    with recorder:
        made = model(*_own(args), **_own(kwargs))
        if isinstance(made, Generator | Coroutine):
            raise TypeError(f"it returned a {type(made).__name__}, which computes nothing until it is run")
        if model.training and (made is None or isinstance(made, str | bytes | int | float)):
            raise TypeError(f"it returned {reprlib.repr(made)}, from which nothing can be trained; return tensors")
        return made


def _own(value: Any) -> Any:
    """The same values in dicts, lists and tuples that the forward may change."""
    if type(value) is dict:
        return {key: _own(each) for key, each in value.items()}
    return type(value)(map(_own, value)) if type(value) in (list, tuple) else value


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the random state, the mode of torch.compile and of checkpointing, and the warnings afterwards.

    Garbage collection is deferred: the copy and its graph are many small objects, none of them garbage yet.
    """
    reentrant = torch.utils.checkpoint.CheckpointFunction
    apply = reentrant.__dict__.get("apply")
    with ExitStack() as stack:
        stack.enter_context(deferred_gc())
        stack.enter_context(random_state_kept())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # torch logs a traceback of what a fake tensor refuses, where the refusal's message has its place, and a warning
        # for a model that asks whether it is traced.
        for name in ("torch._subclasses.fake_tensor", "torch.fx._symbolic_trace"):
            log = logging.getLogger(name)
            stack.callback(setattr, log, "disabled", log.disabled)
            log.disabled = True
        # A re-entrant checkpoint runs its block without gradients, which would hide that its inputs need them.
        reentrant.apply = staticmethod(_run_plainly)  # type: ignore[method-assign]
        try:
            yield
        finally:
            if apply is None:
                del reentrant.apply
            else:
                reentrant.apply = apply  # type: ignore[method-assign]


def _run_plainly(run: Callable[..., Any], preserve_random_state: bool, *args: Any) -> Any:
    return run(*args)


def _symbol(mode: FakeTensorMode, hint: int) -> torch.SymInt:
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    size: Any = mode.from_tensor(torch.empty(hint, dtype=torch.bool), symbolic_context=context).shape[0]
    if not isinstance(size, torch.SymInt):
        raise SpecialisedError(f"torch made no symbol of a batch of {hint}")
    symbol: torch.SymInt = size
    return symbol


def _fake_input(mode: FakeTensorMode, tensor: Tensor, shape: BatchShape) -> Tensor:
    """A fake tensor of a shape, with the order of strides of `tensor`."""
    if tensor.layout != torch.strided:
        return mode.from_tensor(tensor, static_shapes=True)
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    with mode:
        fake = torch.empty([shape[d] for d in order], dtype=tensor.dtype, device=tensor.device)
        if order != list(range(tensor.dim())):
            fake = fake.permute([order.index(d) for d in range(tensor.dim())])
    return fake.requires_grad_(tensor.requires_grad)


def _real_copy(tensor: Tensor) -> Tensor:
    if tensor.device.type == "meta":
        raise ValueError("a tensor of the model is on the meta device, so that it cannot be run on numbers")
    copied = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


def _unwrap_compiled(modules: dict[str, nn.Module]) -> None:
    """Make torch.compile's wrappers call the module that they hold, as their own forward calls the original model."""
    for module in modules.values():
        inner = module._modules.get("_orig_mod")
        if inner is not None and type(module).__name__ == "OptimizedModule":
            module.__dict__["forward"] = lambda *args, _inner=inner, **kwargs: _inner(*args, **kwargs)
        module.__dict__["_compiled_call_impl"] = None
