"""Calls of a policy's `train` functions, and checks of what they return: a user's mistake there has a place."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from loka.errors import InputError
from loka.model.callables import authors_frame, describe_error, message_of, place_of

BATCHES, TEST, LOSS = "train.batches", "train.test", "train.loss"
_ARGUMENTS = {
    BATCHES: "the batch size and a seed",
    TEST: "the batch size and a seed",
    LOSS: "the output and the target",
}

Result = TypeVar("Result")
Inputs = Any  # inputs of one call of the model: a tuple, a dict of keywords, or one Tensor


class TrainingCallError(InputError):
    """A function of `train` that cannot be used as it is; `field` is the policy's, "train.batches"."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(f"{field}: {message}")


def called(field: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """The function's result. Raises TrainingCallError where it does not take these arguments; its own errors stay."""
    try:
        return function(*arguments)
    except TypeError as error:
        if _is_inner(error):
            raise
        raise TrainingCallError(field, f"it is called with {_ARGUMENTS[field]}: {error}; correct it") from error


def pairs(field: str, batches: Any) -> Iterator[tuple[Any, Any]]:
    """The batches. Raises TrainingCallError where they are no iterable, or one is no pair of inputs and target."""
    try:
        iterator = iter(batches)
    except TypeError as error:
        if _is_inner(error):
            raise
        raise TrainingCallError(
            field, f"it returned {_shown(batches)}, which is no iterable; yield (inputs, target), batch by batch"
        ) from error
    for batch in _each(field, iterator):
        try:
            inputs, target = batch
        except (TypeError, ValueError):
            raise TrainingCallError(field, f"a batch is {_shown(batch)}; each has to be (inputs, target)") from None
        yield inputs, target


def _is_inner(error: Exception) -> bool:
    """True if an error was raised within what was called, and not by calling it."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is not None


def _each(field: str, iterator: Iterator[Any]) -> Iterator[Any]:
    """Each batch. Raises TrainingCallError for a generator that raises StopIteration: a bare `next` at its end."""
    try:
        yield from iterator
    except RuntimeError as error:
        if not isinstance(error.__cause__, StopIteration):
            raise
        where = place_of(error.__cause__)
        at = f", at {where}" if where else ""
        raise TrainingCallError(field, f"its generator raised StopIteration{at}; end it with return") from error


def forward(field: str, model: nn.Module, inputs: Inputs, device: str) -> Any:
    """The model's output for the inputs of one of the field's batches, moved to the device.

    Raises TrainingCallError where they cannot be moved, or forward does not take them; its own errors stay.
    """
    try:
        moved = to_device(inputs, device)
    except (RuntimeError, NotImplementedError) as error:
        raise TrainingCallError(
            field, f"the inputs cannot be moved to {device}: {describe_error(error)}; yield Tensors with values"
        ) from error
    try:
        return call(model, moved)
    except TypeError as error:
        if authors_frame(error) or "forward()" not in message_of(error):
            raise
        raise TrainingCallError(field, f"forward does not take a batch's inputs: {message_of(error)}") from error


def backward(loss: Tensor) -> None:
    """Compute the gradients. Raises TrainingCallError where `loss` has computed them already."""
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise TrainingCallError(
            LOSS, "the graph of its result has been used up; return the loss without calling backward in it"
        ) from error


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Call the model with a tuple or list of positional arguments, a dict of keywords, or one Tensor."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def to_device(inputs: Inputs, device: str) -> Inputs:
    """The inputs with every Tensor in them on the device."""
    return mapped(inputs, lambda value: value.to(device) if hasattr(value, "to") else value)


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Nested mappings, tuples and lists, as dicts and tuples, with what `function` makes of everything else in them."""
    if isinstance(value, Mapping):
        return {name: mapped(item, function) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(mapped(item, function) for item in value)
    return function(value)


def movable(target: Any) -> Any:
    """The target of a training batch. Raises TrainingCallError where it is nothing that moves to a device."""
    if not hasattr(target, "to"):
        raise TrainingCallError(BATCHES, f"a target is {_shown(target)}; each has to be a Tensor")
    return target


def scalar(loss: object) -> Tensor:
    """The loss, without dimensions. Raises TrainingCallError where it is no Tensor of one number with a gradient."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TrainingCallError(LOSS, f"it returned {_shown(loss)}; return a Tensor of one number")
    if loss.is_complex():
        raise TrainingCallError(LOSS, f"it returned a Tensor of {loss.dtype}; return a real number")
    if not loss.requires_grad:
        raise TrainingCallError(LOSS, "its result has no gradient; compute it from the output, without detaching it")
    return loss.reshape(())


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a Tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return reprlib.repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def tensors_of(value: object) -> list[Tensor]:
    """The tensors in nested tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [found for item in value.values() for found in tensors_of(item)]
    if isinstance(value, tuple | list):
        return [found for item in value for found in tensors_of(item)]
    return []
