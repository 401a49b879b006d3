"""Writes a forward that runs, on fake tensors or on a few real samples, as a graph: each function of torch a node.

For forwards that torch cannot read as one graph, and for models of so many modules that reading them takes minutes.
"""

from __future__ import annotations

import logging
import operator
import reprlib
import sys
import warnings
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from loka.graph.sites.forward import Forward, Origin, Place, names_of
from loka.graph.sites.products.catalogue import has_place
from loka.model.build_model import BuiltModel
from loka.model.callables import place_in_model
from loka.model.copying import copy_model
from loka.model.example_inputs import random_state_kept
from loka.model.inputs import Shape, cut_inputs, resized_inputs, tensors_in


def record_fake(built: BuiltModel, batch: int, modes: Iterable[bool]) -> list[Forward]:
    """The forwards on fake tensors at a batch size; `modes` are True for training. Raises what a forward raises."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    args, kwargs = fake_inputs(built, batch, mode)
    return _record(fake_copy(built, mode), args, kwargs, mode, modes)


def record_real(built: BuiltModel, batch: int, modes: Iterable[bool]) -> list[Forward]:
    """The forwards of a real copy of the model on the first samples of the example inputs.

    Raises NotCuttableError where the inputs cannot be cut to `batch` samples, and what a forward does.
    """
    args, kwargs = cut_inputs((built.args, built.kwargs), built.batch_size, batch)
    return _record(copy_model(built.module, _real_copy), args, kwargs, nullcontext(), modes)


def fake_copy(built: BuiltModel, mode: FakeTensorMode) -> dict[str, nn.Module]:
    """Copies of the modules by name, with fake Parameters and buffers; those on meta are where the inputs are."""
    device = next((t.device for t in tensors_in((built.args, built.kwargs))), torch.device("cpu"))
    known: dict[tuple[Any, ...], Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return mode.from_tensor(tensor, static_shapes=True)
        key = (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
        if key not in known:  # alike ones share what is behind them: a copy of ten thousand takes no time
            with unset_fake_temporarily():
                meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            known[key] = meta.requires_grad_(tensor.requires_grad)
        made = FakeTensor(mode, known[key], device if tensor.is_meta else tensor.device)
        if isinstance(tensor, nn.Parameter):
            made._is_param = True  # what isinstance(made, nn.Parameter) asks
        return made

    return copy_model(built.module, fake)


def fake_inputs(built: BuiltModel, batch: int, mode: FakeTensorMode) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example inputs as fake tensors, at a batch size."""

    def fake(tensor: Tensor, shape: Shape) -> Tensor:
        if tensor.layout != torch.strided:
            return mode.from_tensor(tensor, static_shapes=True)
        with mode:
            return empty_like(tensor, shape)

    args, kwargs = resized_inputs((built.args, built.kwargs), built.batch_size, batch, fake)
    return args, kwargs


def empty_like(tensor: Tensor, shape: Shape) -> Tensor:
    """A tensor without values, of another shape, with the order of strides of `tensor`."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    made = torch.empty([shape[d] for d in order], dtype=tensor.dtype, device=tensor.device)
    if order != list(range(tensor.dim())):
        made = made.permute([order.index(d) for d in range(tensor.dim())])
    return made.requires_grad_(tensor.requires_grad)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the random state, the mode of torch.compile and of checkpointing, and the warnings afterwards."""
    reentrant = torch.utils.checkpoint.CheckpointFunction
    apply = reentrant.__dict__.get("apply")
    with ExitStack() as stack:
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


def _record(
    modules: dict[str, nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], run_in: Any, modes: Iterable[bool]
) -> list[Forward]:
    model = modules[""]
    _unwrap_compiled(modules)
    found = []
    with run_in:
        for training in modes:
            model.train(training)
            recorder = _Recorder(model, tensors_in((args, kwargs)))
            with torch.set_grad_enabled(training), recorder.watching(modules):
                made = _run(model, args, kwargs, recorder)
            if training and (made is None or isinstance(made, str | bytes | int | float)):
                raise TypeError(f"it returned {reprlib.repr(made)}, from which nothing can be trained; return tensors")
            found.append(recorder.forward(tensors_in(made)))
    return found


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], recorder: _Recorder) -> Any:
    """The frame at which the search for the model's own line ends."""
    with recorder:
        made = model(*_own(args), **_own(kwargs))
    if isinstance(made, Generator | Coroutine):
        raise TypeError(f"it returned a {type(made).__name__}, which computes nothing until it is run")
    return made


def _own(value: Any) -> Any:
    """The same values in dicts, lists and tuples that the forward may change."""
    if type(value) is dict:
        return {key: _own(each) for key, each in value.items()}
    return type(value)(map(_own, value)) if type(value) in (list, tuple) else value


class _Recorder(TorchFunctionMode):
    """Writes what a forward of `model` calls. A tensor that is changed in place is the change's result from then on."""

    def __init__(self, model: nn.Module, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.called: set[str] = set()
        self._call = _Alike()
        self._stack: list[str] = []
        self._nodes: dict[int, fx.Node] = {}  # by the id of a tensor, which its node keeps alive
        for tensor, origin in names_of(model):
            self._hold(tensor, origin)
        self._fixed = frozenset(self._nodes)
        for tensor in inputs:
            self._hold(tensor, Origin(is_input=True))

    def forward(self, outputs: Iterable[Tensor]) -> Forward:
        """What was recorded, of a forward that returned these tensors."""
        return Forward(self.graph, tuple(outputs), frozenset(self.called), {})

    @contextmanager
    def watching(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Knows which module's forward runs."""
        before = {name: vars(module).get("forward") for name, module in modules.items()}
        for name, module in modules.items():
            if not isinstance(module, torch.jit.ScriptModule):
                vars(module)["forward"] = self._named(name, module.forward)
        try:
            yield
        finally:
            for name, module in modules.items():
                vars(module).pop("forward", None)
                if before[name] is not None:
                    vars(module)["forward"] = before[name]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a torch function, and write a node."""
        named = dict(kwargs or {})
        out = self._call(func, args, named)
        value = args[0] if out is None and args else out  # x[...] = y
        if isinstance(value, Tensor):
            if id(value) not in self._fixed:  # a cast that changes nothing returns the Parameter itself
                self._nodes[id(value)] = self._add(func, args, named, value)
        elif isinstance(value, tuple | list) and (tensors := tensors_in(value)):
            node = self._add(func, args, named, value)
            self._nodes.update((id(tensor), node) for tensor in tensors)
            for place, tensor in enumerate(value):
                if isinstance(tensor, Tensor):
                    self._nodes[id(tensor)] = self._add(operator.getitem, (None, place), {}, tensor)
                    self._nodes[id(tensor)].args = (node, place)
        return out

    def _add(self, func: Callable[..., Any], args: Any, kwargs: Any, value: Any) -> fx.Node:
        node = self.graph.call_function(func, self._mapped(args), self._mapped(kwargs))
        caller, owner = ["", "", *self._stack[-2:]][-2:]
        node.meta.update(example_value=value, owner=owner, caller=caller)
        if torch._C._are_functorch_transforms_active():
            node.meta["transformed"] = True
        if has_place(func):
            node.meta["place"] = Place(*place_in_model(sys._getframe(2), _run.__code__))
        return node

    def _hold(self, tensor: Tensor, origin: Origin) -> None:
        if id(tensor) not in self._nodes:
            self._nodes[id(tensor)] = node = self.graph.placeholder(f"held_{len(self._nodes)}")
            node.meta.update(example_value=tensor, origin=origin)

    def _mapped(self, value: Any) -> Any:
        """Arguments with nodes for tensors."""
        if isinstance(value, Tensor):
            self._hold(value, Origin())
            return self._nodes[id(value)]
        if isinstance(value, tuple | list):
            return tuple(map(self._mapped, value)) if isinstance(value, tuple) else list(map(self._mapped, value))
        return {key: self._mapped(each) for key, each in value.items()} if isinstance(value, dict) else value

    def _named(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.called.add(name)
            self._stack.append(name)
            try:
                return original(*args, **kwargs)
            finally:
                self._stack.pop()

        forward.__wrapped__ = original  # type: ignore[attr-defined]  # what inspect.signature follows
        return forward


class _Alike:
    """Calls functions; on fake tensors alike calls are computed once, as each takes up to half a millisecond."""

    def __init__(self) -> None:
        self._known: dict[
            Any, tuple[Tensor, torch.device, bool]
        ] = {}  # on meta; where it is; whether it needs a gradient

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the function returns."""
        tensors = tensors_in((args, kwargs))
        source = next((each for each in tensors if type(each) is FakeTensor), None)
        if source is None or torch.is_autocast_enabled(source.device.type):
            return func(*args, **kwargs)
        key = func, torch.is_grad_enabled(), _spec(args), _spec(kwargs)
        try:
            known = self._known.get(key)
        except TypeError:  # an argument that cannot be a key
            return func(*args, **kwargs)
        if known is None:
            made = func(*args, **kwargs)
            if type(made) is FakeTensor and _is_new(made, tensors):
                with unset_fake_temporarily():
                    meta = torch.empty(made.shape, dtype=made.dtype, device="meta")
                self._known[key] = meta, made.device, made.requires_grad
            return made
        meta, device, needs_grad = known
        if not needs_grad:
            return FakeTensor(source.fake_mode, meta, device)
        needing = next(each for each in tensors if each.requires_grad)
        return _Made.apply(lambda: FakeTensor(source.fake_mode, meta, device), needing)  # type: ignore[no-untyped-call]


def _spec(value: Any) -> Any:
    """Arguments as a key, with what fake results depend on for tensors."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.layout, value.requires_grad
    if isinstance(value, tuple | list):
        return type(value), *map(_spec, value)
    if isinstance(value, slice):
        return slice, value.start, value.stop, value.step
    if isinstance(value, dict):
        return tuple((key, _spec(each)) for key, each in value.items())
    return type(value), value


def _is_new(made: Tensor, given: Iterable[Tensor]) -> bool:
    """True for a plain tensor that is neither an argument nor a view of one."""
    plain = made.layout == torch.strided and made.is_contiguous() and not made._is_view()
    return plain and not any(made is each for each in given)


class _Made(torch.autograd.Function):
    """Adds a fake tensor to the autograd graph, so that it needs a gradient as its source does and is not a leaf."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], source: Tensor) -> Tensor:
        return make()


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
