"""How a model calls the modules whose forwards are rewritten: real arguments, at two batch sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loka.sites.refused import Refused

MOST_CALLS = 4  # calls kept of one module at one batch size: those that differ in shape or arguments


@dataclass(frozen=True, slots=True)
class ExampleCall:
    """One call of a module: what it was given at one batch size of the model."""

    batch: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Examples:
    """The calls of one module, at two batch sizes or more."""

    owner: str  # qualified name; "" is the model
    calls: tuple[ExampleCall, ...]


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """What the model itself is called with."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


def capture_examples(
    model: nn.Module, owners: Collection[str], batches: Mapping[int, ModelInputs]
) -> dict[str, Examples | Refused]:
    """Runs the model once for each batch size (on the device it is on, without gradients, as it was left: training or
    evaluation), and keeps what each module in `owners` was called with. The model's buffers and the random state
    are put back.

    A module that holds meta tensors, or whose model does, has no examples (`Refused`: which tensor, and its size), and
    neither has one that is not called at every batch size. Exceptions of the model pass through.
    """
    blocked = _without_storage(model)
    if blocked is not None:
        return {owner: Refused(owner, f"its inputs cannot be captured: {blocked}") for owner in owners}
    found: dict[str, list[ExampleCall]] = {owner: [] for owner in owners}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for batch, inputs in batches.items():
            hooks = [_listen(model.get_submodule(owner), batch, calls) for owner, calls in found.items()]
            try:
                model(*inputs.args, **(inputs.kwargs or {}))
            finally:
                for hook in hooks:
                    hook.remove()
        for buffer, value in buffers:
            buffer.copy_(value)
    return {owner: _examples(owner, calls, batches) for owner, calls in found.items()}


def _examples(owner: str, calls: list[ExampleCall], batches: Mapping[int, ModelInputs]) -> Examples | Refused:
    missing = [batch for batch in batches if not any(call.batch == batch for call in calls)]
    if missing:
        return Refused(owner, f"the model does not call it at batch {missing[0]}")
    return Examples(owner, tuple(calls))


def _listen(module: nn.Module, batch: int, calls: list[ExampleCall]) -> torch.utils.hooks.RemovableHandle:
    seen: set[str] = set()

    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        form = repr([*map(form_of, args), *((name, form_of(value)) for name, value in sorted(kwargs.items()))])
        if form not in seen and len(seen) < MOST_CALLS:
            seen.add(form)
            calls.append(ExampleCall(batch, copy_tree(args), copy_tree(kwargs)))

    return module.register_forward_pre_hook(keep, with_kwargs=True, prepend=True)


def form_of(value: object) -> object:
    """What two calls are told apart by: dtypes and shapes of tensors, plain values, types of the rest."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, tuple | list):
        return [form_of(item) for item in value]
    if isinstance(value, dict):
        return {str(key): form_of(item) for key, item in value.items()}
    return value if isinstance(value, bool | int | float | str | None) else type(value).__qualname__


def copy_tree(value: Any) -> Any:
    """Containers and tensors copied, so that a forward that writes into its inputs leaves the example alone."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copy_tree, value))
    if type(value) in (tuple, list):
        return type(value)(map(copy_tree, value))
    if type(value) is dict:
        return {key: copy_tree(item) for key, item in value.items()}
    return value


def _without_storage(model: nn.Module) -> str | None:
    for name, tensor in _tensors(model):
        if tensor.is_meta:
            size = tensor.numel() * tensor.element_size() / 2**30
            return f"'{name}' of the model was built without storage ({size:.1f} GiB)"
    return None


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
