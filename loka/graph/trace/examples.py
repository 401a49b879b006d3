"""Examples: the arguments with which a model calls the modules to rewrite, at two batch sizes."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loka.graph.capture.captured import map_tree
from loka.graph.capture.undisturbed import buffers_kept
from loka.graph.ir import Refused
from loka.model.large_tensors import LARGE, without_numbers

MOST_CALLS = 4  # kept per module and batch size; they differ in shape or arguments


@dataclass(frozen=True, slots=True)
class ExampleCall:
    """One call of a module: its arguments at one batch size of the model."""

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
    """Arguments of the model itself."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings, and what torch.fx logs of models that ask whether they are traced. Also a decorator."""
    log = logging.getLogger("torch.fx._symbolic_trace")
    disabled = log.disabled
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.disabled = True
        try:
            yield
        finally:
            log.disabled = disabled


@quiet()
def capture_examples(
    model: nn.Module, owners: Collection[str], batches: Mapping[int, ModelInputs]
) -> dict[str, Examples | Refused]:
    """The calls of each module in `owners`, at each batch size.

    Runs the model once per batch size, without gradients, in its current mode. Its buffers and the random state are
    restored. Embedding tables without storage (on the meta device) are replaced by one row, read for every index. A
    module that is not called at every batch size is `Refused`; all are, if another kind of tensor has no storage.
    Exceptions of the model are passed on.
    """
    blocked = missing_storage(model, tables=False)
    if blocked is not None:
        return {owner: Refused(owner, f"its inputs cannot be captured: {blocked}") for owner in owners}
    found: dict[str, list[ExampleCall]] = {owner: [] for owner in owners}
    with _tables_stood_in(model):
        for batch, inputs in batches.items():
            hooks = [_listen(model.get_submodule(owner), batch, calls) for owner, calls in found.items()]
            try:
                with buffers_kept(model):
                    model(*inputs.args, **(inputs.kwargs or {}))
            finally:
                for hook in hooks:
                    hook.remove()
    return {owner: _examples(owner, calls, batches) for owner, calls in found.items()}


@contextlib.contextmanager
def _tables_stood_in(model: nn.Module) -> Iterator[None]:
    """Replaces every two-dimensional meta Parameter by one random row for all indices, which takes no memory."""
    swapped: list[tuple[nn.Module, str, nn.Parameter | None]] = []
    try:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    rows, width = parameter.shape
                    # A step of 2 between neighbours keeps nn.EmbeddingBag from making a contiguous copy of the table.
                    row = torch.randn(2 * width, dtype=torch.float32).to(parameter.dtype)
                    swapped.append((module, name, parameter))
                    substitute = row.as_strided((rows, width), (0, 2))
                    module._parameters[name] = nn.Parameter(substitute, requires_grad=False)
        yield
    finally:
        for module, name, parameter in swapped:
            module._parameters[name] = parameter


def _examples(owner: str, calls: list[ExampleCall], batches: Mapping[int, ModelInputs]) -> Examples | Refused:
    missing = [batch for batch in batches if not any(call.batch == batch for call in calls)]
    if missing:
        return Refused(owner, f"the model does not call it at batch {missing[0]}", called=False)
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
    """Key that distinguishes calls: dtypes and shapes of tensors, plain values, types of the rest."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, tuple | list):
        return [form_of(item) for item in value]
    if isinstance(value, dict):
        return {str(key): form_of(item) for key, item in value.items()}
    return value if isinstance(value, bool | int | float | str | None) else type(value).__qualname__


def copy_tree(value: Any) -> Any:
    """Copy of containers and tensors, so that a forward that modifies its inputs does not change the example."""
    return map_tree(value, lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf)


def missing_storage(module: nn.Module, tables: bool = True) -> str | None:
    """The first tensor of a module without values, in words; None where there is none.

    `tables`: count meta matrices too. LoKA itself puts tensors that are too large for planning on the meta device;
    others were put there by the factory.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        is_table = isinstance(tensor, nn.Parameter) and tensor.ndim == 2 and tensor.is_floating_point()
        found = without_numbers(tensor)
        if found is None or (tensor.is_meta and is_table and not tables):
            continue
        size = tensor.numel() * tensor.element_size()
        if size > LARGE:
            return f"'{name}' was built without storage ({size / 2**30:.1f} GiB)"
        return f"'{name}' is {found}, and forwards are run to be checked: build the model with weights, random ones do"
    return None
