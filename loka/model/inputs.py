"""Example inputs of another batch size, or cut to fewer samples."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class NotCuttableError(ValueError):
    """Inputs that cannot be sliced to their first samples without knowledge of their meaning."""


Shape = tuple[int, ...]


def batch_shape(tensor: Tensor, batch: int, size: int) -> Shape:
    """The shape with the batch replaced by `size`: dimension 0, if it equals the batch.

    A 1-D integer tensor one longer than the batch is taken as offsets of bags, as in nn.EmbeddingBag.
    """
    shape: Shape = tuple(tensor.shape)
    if shape and shape[0] == batch:
        return (size, *shape[1:])
    if len(shape) == 1 and shape[0] == batch + 1 and not tensor.is_floating_point():
        return (size + 1,)
    return shape


def resized_inputs(value: Any, batch: int, size: int, make: Callable[[Tensor, Shape], Tensor]) -> Any:
    """Copy a structure of inputs; `make(tensor, shape)` replaces each tensor, with the batch changed to `size`.

    Tuples, lists, dictionaries, dataclasses and plain objects are traversed; torchrec's KeyedJaggedTensor is rebuilt
    without a stride, so that it asks its lengths.
    """

    def visit(part: Any) -> Any:
        if isinstance(part, Tensor):
            return make(part, batch_shape(part, batch, size))
        if type(part).__name__ == "KeyedJaggedTensor" and not part.variable_stride_per_key() and part.stride() == batch:
            return _fake_jagged(part, size, make)
        return rebuild(part, visit)

    return visit(value)


def cut_inputs(value: Any, batch: int, size: int) -> Any:
    """A copy of the inputs with the first `size` samples of each tensor; `size == batch` copies.

    Raises:
        NotCuttableError: Jagged inputs, or offsets, with a size other than the batch; a batch smaller than `size`.
    """
    if size > batch:
        raise NotCuttableError(f"{batch} samples cannot be cut to {size}")

    def visit(part: Any) -> Any:
        if isinstance(part, Tensor):
            shape = batch_shape(part, batch, size)
            if len(shape) and shape[0] != part.shape[0] and part.shape[0] != batch:
                raise NotCuttableError("offsets of bags")
            cut = part.detach()[: shape[0]] if shape else part.detach()
            return cut.clone().requires_grad_(part.requires_grad)
        if size != batch and "Jagged" in type(part).__name__:
            raise NotCuttableError(f"a {type(part).__name__}")
        return rebuild(part, visit)

    return visit(value)


def rebuild(value: Any, visit: Callable[[Any], Any]) -> Any:
    """A shallow copy of a container or plain object with each part visited; anything else unchanged."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(visit(part) for part in value))
    if type(value) in (tuple, list):
        return type(value)(visit(part) for part in value)
    if isinstance(value, dict):
        fresh = copy.copy(value)
        for key, part in value.items():
            fresh[key] = visit(part)
        return fresh
    if _holds_tensors(value):
        fresh = copy.copy(value)
        for key, part in _attributes(value).items():
            object.__setattr__(fresh, key, visit(part))
        return fresh
    return value


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A copy of a structure with `change(tensor)` in the place of each tensor."""
    return change(value) if isinstance(value, Tensor) else rebuild(value, lambda part: mapped(part, change))


def to_device(value: Any, device: str) -> Any:
    """A copy of a structure with each tensor on the device, and each other value that has a method `to`."""
    return value.to(device) if hasattr(value, "to") else rebuild(value, lambda part: to_device(part, device))


def arguments(module: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of a module's forward for the inputs of a batch.

    A tuple or list has positional arguments. A mapping has keywords; where forward does not take these, it is the one
    argument, as anything else is.
    """
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    if isinstance(inputs, Mapping) and (_takes(module, (), inputs) or not _takes(module, (inputs,), {})):
        return (), dict(inputs)
    return (inputs,), {}


def _takes(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True if forward can be called with these arguments."""
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # ValueError: nothing to read a signature from
        return False
    return True


def empty_like(tensor: Tensor, shape: Shape) -> Tensor:
    """A tensor without values, of another shape, with the order of strides of `tensor`."""
    order = order_of_strides(tensor)
    made = torch.empty([shape[d] for d in order], dtype=tensor.dtype, device=tensor.device)
    if order != tuple(range(tensor.dim())):
        made = made.permute([order.index(d) for d in range(tensor.dim())])
    return made.requires_grad_(tensor.requires_grad)


def order_of_strides(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor as they are in memory, outermost first."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], d)))


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor of a structure of inputs."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(part: Any, found: list[Tensor]) -> Any:
    """Append the tensors; no closure that refers to itself, which would keep them until garbage is collected."""
    if isinstance(part, Tensor):
        found.append(part)
        return part
    return rebuild(part, lambda inner: _collect(inner, found))


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, those of a dataclass with slots too."""
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict) or not dataclasses.is_dataclass(value):
        return held if isinstance(held, dict) else {}
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _holds_tensors(value: Any) -> bool:
    """True if an object is a plain container of tensors, directly or nested; such objects are traversed."""
    if isinstance(value, type | nn.Module) or callable(value):
        return False
    return dataclasses.is_dataclass(value) or any(
        isinstance(part, Tensor) or (isinstance(part, list | tuple | dict) and _tensor_inside(part))
        for part in _attributes(value).values()
    )


def _tensor_inside(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value
    return any(isinstance(part, Tensor) for part in parts)


def _fake_jagged(jagged: Any, size: int, make: Callable[[Tensor, Shape], Tensor]) -> Any:
    keys = jagged.keys()
    weights = jagged.weights_or_none()
    return type(jagged)(
        keys=list(keys),
        values=make(jagged.values(), tuple(jagged.values().shape)),
        weights=None if weights is None else make(weights, tuple(weights.shape)),
        lengths=make(jagged.lengths(), (len(keys) * size,)),
        length_per_key=list(jagged.length_per_key()),
        offset_per_key=list(jagged.offset_per_key()),
    )
