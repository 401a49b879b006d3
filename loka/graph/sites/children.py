"""Runs a module whose forward is not read, and keeps the calls of its children, which are.

On fake tensors, or on a few real samples where the forward asks for values.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from loka.graph.sites.captured_forward import ModuleCall
from loka.model.build_model import BuiltModel
from loka.model.copying import copy_model
from loka.model.example_inputs import random_state_kept
from loka.model.inputs import rebuild, tensors_in


@dataclass(frozen=True, slots=True, eq=False)
class ModuleRun:
    """A run of a module's forward: the calls of children in their order, and what it did itself."""

    calls: tuple[ModuleCall, ...]
    result: Any
    reads: frozenset[int]  # ids of the tensors that its own operations are given
    flops: int  # of its own products
    counts: Counter[str]  # of calls of all modules inside


def run_module(
    modules: Mapping[str, nn.Module],
    call: ModuleCall,
    mode: FakeTensorMode | None,
    known: dict[Any, Tensor],
    described: Callable[[str], Any],
) -> ModuleRun:
    """Runs a module of a copied model as a call of it did. Raises what the forward raises.

    In the mode of fake tensors, children are not run again where `known` has what an alike call returned; `described`
    gives what is equal for alike modules.
    """
    below = f"{call.name}." if call.name else ""
    own, calls, counts = _OwnOperations(), list[ModuleCall](), Counter[str]()

    def keeping(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            if not own.active:
                return original(*args, **kwargs)
            own.active = False
            given = ModuleCall(name, args, kwargs, torch.is_grad_enabled())
            key = None if mode is None else (described(name), given.description)
            try:
                made = known[key].clone() if key in known else original(*args, **kwargs)
                if key is not None and key not in known and _is_new(made, given):
                    known[key] = made
            finally:
                own.active = True
            calls.append(replace(given, result=made))
            return made

        forward.__wrapped__ = original  # type: ignore[attr-defined]  # what inspect.signature follows
        return forward

    before = dict[str, Any]()
    for name, module in modules.items():
        if name.startswith(below) and name != call.name and not isinstance(module, torch.jit.ScriptModule):
            before[name] = vars(module).get("forward")
            vars(module)["forward"] = keeping(name, module.forward)
    args, kwargs = _fresh((call.args, dict(call.kwargs)))
    try:
        with ExitStack() as stack:
            for each in (torch.set_grad_enabled(call.gradients), mode, own):
                if each is not None:
                    stack.enter_context(each)
            made = modules[call.name](*args, **kwargs)
            if isinstance(made, Generator | Coroutine):
                raise TypeError(f"it returned a {type(made).__name__}, which computes nothing until it is run")
    finally:
        for name, own_forward in before.items():
            vars(modules[name]).pop("forward")
            if own_forward is not None:
                vars(modules[name])["forward"] = own_forward
    return ModuleRun(tuple(calls), made, frozenset(own.read), own.flops, counts)


def _is_new(made: Any, given: ModuleCall) -> bool:
    """True for a tensor that is neither an argument nor a view of one."""
    return isinstance(made, Tensor) and not made._is_view() and all(made is not each for each in tensors_in(given.args))


class _OwnOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what operations are given while `active`, in the forward itself, not in a child's; and their FLOPs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.active, self.flops = True, 0
        self.read: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if self.active:
            self.read.update(map(id, tensors_in((args, kwargs or {}))))
            count = flop_registry.get(getattr(func, "_overloadpacket", None))
            self.flops += 0 if count is None else count(*args, **(kwargs or {}), out_val=made)
        return made


def _fresh(value: Any) -> Any:
    """The same values in dicts, lists and tuples that the forward may change."""
    return value if isinstance(value, Tensor) else rebuild(value, _fresh)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the random state, the mode of torch.compile, and the warnings afterwards."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # a traceback of what a fake tensor refuses
    with random_state_kept(), torch.compiler.set_stance("force_eager"), warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        stack.callback(setattr, log, "disabled", log.disabled)
        log.disabled = True
        yield


def real_copy(built: BuiltModel) -> dict[str, nn.Module]:
    """Copies of the modules by name. Raises ValueError for what has no numbers."""
    return _without_compiled(copy_model(built.module, _real))


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

    return _without_compiled(copy_model(built.module, fake))


def _real(tensor: Tensor) -> Tensor:
    if tensor.device.type == "meta":
        raise ValueError("a tensor of the model is on the meta device, so that it cannot be run on numbers")
    copied = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


def _without_compiled(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Make torch.compile's wrappers call the module that they hold, as their own forward calls the original model."""
    for module in modules.values():
        inner = module._modules.get("_orig_mod")
        if inner is not None and type(module).__name__ == "OptimizedModule":
            module.__dict__["forward"] = lambda *args, _inner=inner, **kwargs: _inner(*args, **kwargs)
        module.__dict__["_compiled_call_impl"] = None
    return modules
