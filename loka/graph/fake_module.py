"""A module on fake tensors: the user's own classes and attributes, without values, wrappers, hooks or what LoKA added.

It can be captured while the module trains, sharded, on a GPU or without values, and the module is not touched.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from loka.graph.source import is_simple
from loka.graph.wrappers import innermost, own_class

_INTERNAL = frozenset(vars(nn.Module()))
_CONTAINERS = (list, dict, OrderedDict, defaultdict, Counter, deque)
_HOOKS = tuple(name for name in _INTERNAL if "_hooks" in name)
# Attributes that data parallelism, Module.compile() and binding add to modules.
_ADDED = ("_fsdp", "_is_fsdp", "_ddp", "_compiled_call_impl", "loka")


class FakeModules:
    """Makes modules on fake tensors, all of one mode.

    Args:
        device: Of the tensors.
        dtype: Of all floating-point tensors; None: each keeps its own.
        shapes: Shapes of Parameters by path below the first module, for those that are in pieces.
        mode: In which tensors are made; None: one of fake tensors.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype | None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        mode: AbstractContextManager[Any] | None = None,
    ) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode  # these import slowly
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.mode = mode or FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self._device, self._dtype, self._shapes = device, dtype, shapes or {}
        self._made: dict[int, Any] = {}
        self._keep: list[object] = []  # as ids are only good while their objects live

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...] | None = None) -> Tensor:
        """A fake tensor."""
        dtype = self._dtype or dtype if dtype.is_floating_point else dtype
        with self.mode:
            if stride is None:
                return torch.empty(shape, dtype=dtype, device=self._device)
            return torch.empty_strided(shape, stride, dtype=dtype, device=self._device)

    def module(self, module: nn.Module, path: str = "") -> nn.Module:
        """A module with everything below it; a wrapped module for its wrapper. The same one each time."""
        module = innermost(module)
        if id(module) in self._made or isinstance(module, torch.jit.ScriptModule):
            return self._made.get(id(module), module)  # type: ignore[no-any-return]
        made: nn.Module = object.__new__(own_class(type(module)))
        self._remember(module, made)
        held = {name: value for name, value in vars(module).items() if not name.startswith(_ADDED)}
        made.__dict__ = held | {name: OrderedDict() for name in _HOOKS if name in held}
        below = f"{path}." if path else ""
        held = made.__dict__
        held["_parameters"] = {name: self._held(value, f"{below}{name}") for name, value in module._parameters.items()}
        buffers = {name: value for name, value in module._buffers.items() if not name.startswith("loka_")}
        held["_buffers"] = {name: self._held(value) for name, value in buffers.items()}
        held["_modules"] = {
            name: None if child is None else self.module(child, f"{below}{name}")
            for name, child in module._modules.items()
        }
        for name in held.keys() - _INTERNAL:
            held[name] = self._held(held[name])
        return made

    def _held(self, value: Any, path: str = "") -> Any:
        """A value that a module holds, with fakes for the modules and tensors in it."""
        if id(value) in self._made:
            return self._made[id(value)]
        if isinstance(value, nn.Module):
            return self.module(value)
        if isinstance(value, Tensor):
            return self._remember(value, self._faked(value, path))
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, self.module(value.__self__))
        if isinstance(value, functools.partial):
            return functools.partial(self._held(value.func), *map(self._held, value.args), **self._held(value.keywords))
        if type(value) in _CONTAINERS:
            made = self._remember(value, copy.copy(value))
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                made[key] = self._held(item)
            return made
        if type(value) is tuple:
            return tuple(map(self._held, value))
        if _changes_when_read(value):  # called children run, on fakes, and the live module's own must not move on
            with contextlib.suppress(Exception):  # some cannot be copied
                return self._remember(value, copy.deepcopy(value))
        return value

    def _faked(self, tensor: Tensor, path: str) -> Tensor:
        if nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
            return tensor
        in_pieces = getattr(tensor, "_fsdp_flattened", False)  # as FullyShardedDataParallel keeps it between forwards
        plain = type(tensor) in (Tensor, nn.Parameter) and not in_pieces
        shape = self._shapes.get(path, tuple(tensor.shape)) if in_pieces else tuple(tensor.shape)
        made = self.tensor(shape, tensor.dtype, tensor.stride() if plain else None)
        return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    def _remember(self, value: Any, made: Any) -> Any:
        self._keep.append(value)
        self._made[id(value)] = made
        return made


def _changes_when_read(value: object) -> bool:
    """True for iterators of Python's own, and generators of random numbers."""
    home = type(value).__module__
    is_iterator = isinstance(value, Iterator) and home in ("builtins", "itertools")
    is_generator = isinstance(value, random.Random | torch.Generator) or home.startswith("numpy.random")
    return is_iterator or is_generator or type(value) in (set, bytearray)


def device_of(module: nn.Module) -> torch.device:
    """The device for fakes of a module's tensors: that of the first, the CPU if it has no values."""
    first = next((tensor for tensor in (*module.parameters(), *module.buffers())), None)
    return torch.device("cpu") if first is None or first.device.type == "meta" else first.device


def floating_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype of a module's floating-point tensors; None if it has several, or none."""
    found = {tensor.dtype for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()}
    return found.pop() if len(found) == 1 else None


def likeness(module: nn.Module) -> object | None:
    """Key that is equal for modules with the same forward; None where that cannot be decided.

    It has the type and the plain attributes of every module, shapes and dtypes of Parameters and buffers, and what is
    shared, but no hooks. A module with attributes that are no plain data has none.
    """
    parts = []
    for name, child in module.named_modules():
        child = innermost(child)
        attributes = {k: v for k, v in vars(child).items() if k not in _INTERNAL and not k.startswith(_ADDED)}
        if not all(map(is_simple, attributes.values())):
            return None
        texts = tuple(sorted((key, repr(value)) for key, value in attributes.items()))
        parts.append((name, own_class(type(child)), child.training, texts, _forms(child)))
    modules, tensors = module.named_modules(remove_duplicate=False), module.named_parameters(remove_duplicate=False)
    firsts: dict[int, str] = {}
    held = (*modules, *tensors, *module.named_buffers(remove_duplicate=False))
    return tuple(parts), tuple(firsts.setdefault(id(thing), name) for name, thing in held)


def _forms(module: nn.Module) -> tuple[object, ...]:
    held: dict[str, Any] = module._parameters | module._buffers
    return tuple(
        (name, None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
        for name, tensor in held.items()
        if not name.startswith("loka_")
    )
