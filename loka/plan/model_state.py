"""A digest of everything in a built model that can decide its plan, but for the source files of its code.

It has the modules, their classes and attributes, the forms of Parameters, the values of buffers, and plain globals of
the code that the model is made of. Parameters count without their values, which a factory draws anew each time.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from loka.graph.source import functions_of, has_hooks, is_foreign, is_simple, qualified

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (int, str, bool, float, complex, tuple, list, dict, torch.dtype, torch.device)
_DEEPEST = 8


class IndescribableError(Exception):
    """Something that two processes cannot be compared by, such as an object of an own class."""


def model_state(model: nn.Module, inputs: Callable[[int], object], batches: tuple[int, ...]) -> str | None:
    """sha256 of the model's state and of `inputs` at some batch sizes; None where something cannot be described.

    Exceptions of the model's own code are passed on.
    """
    digest = hashlib.sha256()
    try:
        for line in (*_modules(model), *_globals(model), *(repr(_described(inputs(n), 0)) for n in batches)):
            digest.update(f"{line}\0".encode())
    except (IndescribableError, RecursionError):
        return None
    return digest.hexdigest()


def _modules(model: nn.Module) -> Iterator[str]:
    firsts: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        first = firsts.setdefault(id(module), name)
        yield f"{name} = {first}"
        if first != name:
            continue
        if has_hooks(module) or module._compiled_call_impl is not None:
            raise IndescribableError(name)
        yield qualified(type(module))
        for key, value in sorted(vars(module).items()):
            if key not in _INTERNAL:
                yield f"{key}: {_described(value, 0)!r}"
        for key, tensor in module._parameters.items():
            own = None if tensor is None else (firsts.setdefault(id(tensor), f"{name}.{key}"), _form(tensor))
            yield f"{key}: {own}"
        for key, tensor in module._buffers.items():
            yield f"{key}: {_described(tensor, 0)!r}"


def _globals(model: nn.Module) -> Iterator[str]:
    """Plain attributes of the model's classes, and plain globals of the modules with their code."""
    classes: dict[type, nn.Module] = {}
    for module in model.modules():
        classes.setdefault(type(module), module)
    bases = dict.fromkeys(base for each in classes for base in each.__mro__ if not is_foreign(base.__module__))
    files = {each.__module__ for each in bases}
    files |= {function.__module__ for module in classes.values() for function in functions_of(module)}
    holders: list[tuple[str, Mapping[str, Any]]] = [(qualified(each), vars(each)) for each in bases]
    holders += [(name, vars(sys.modules[name])) for name in sorted(files) if name in sys.modules]
    for holder, held in holders:
        for name, value in sorted(held.items()):
            if not name.startswith("__") and (isinstance(value, _PLAIN) or is_dataclass(value)):
                with suppress(IndescribableError):  # no data that a forward would take a constant from
                    yield f"{holder}.{name} = {_described(value, 0)!r}"


def _described(value: object, depth: int) -> object:
    """Plain data that is equal in two processes only for equal values. Raises IndescribableError."""
    if depth > _DEEPEST:
        raise IndescribableError
    if is_simple(value):
        return value
    if isinstance(value, Tensor):
        return _form(value), _values(value)
    if isinstance(value, Enum | type | FunctionType | BuiltinFunctionType | ModuleType):
        return _code(value)
    if type(value) in (list, tuple):
        return type(value).__name__, [_described(each, depth + 1) for each in value]  # type: ignore[attr-defined]
    if isinstance(value, dict):
        pairs = [(_described(key, depth + 1), _described(each, depth + 1)) for key, each in value.items()]
        return qualified(type(value)), pairs
    if is_dataclass(value):
        held = [(each.name, _described(getattr(value, each.name), depth + 1)) for each in fields(value)]
        return qualified(type(value)), held
    raise IndescribableError(qualified(type(value)))


def _code(value: object) -> str:
    """A class, a function, a member of an enumeration or a module by its name; their sources are compared as files."""
    if isinstance(value, Enum):
        return f"{qualified(type(value))}.{value.name}"
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, FunctionType) and (value.__closure__ or "<" in value.__qualname__):
        raise IndescribableError(qualified(value))  # a lambda, or a function that holds values
    return qualified(value)


def _form(tensor: Tensor) -> str:
    kind = type(tensor).__qualname__
    strides = tensor.stride() if tensor.layout == torch.strided else None
    about = tuple(tensor.shape), strides, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad
    return f"{kind} {about!r}"


def _values(tensor: Tensor) -> str:
    """sha256 of a tensor's values; a tensor without storage has none."""
    if tensor.is_meta:
        return ""
    if tensor.layout != torch.strided or type(tensor) not in (Tensor, nn.Parameter):
        raise IndescribableError
    if not tensor.numel():
        return ""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()
