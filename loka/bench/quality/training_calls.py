"""Calls of a policy's `train` functions, and checks of what they return: a user's mistake there has a place."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from loka.errors import InputError

BATCHES, TEST, LOSS = "train.batches", "train.test", "train.loss"
_ARGUMENTS = {
    BATCHES: "the batch size and a seed",
    TEST: "the batch size and a seed",
    LOSS: "the output and the target",
}

Result = TypeVar("Result")


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
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # within the function
        raise TrainingCallError(field, f"it is called with {_ARGUMENTS[field]}: {error}; correct it") from error


def pairs(field: str, batches: Any) -> Iterator[tuple[Any, Any]]:
    """The batches. Raises TrainingCallError where one is no pair of inputs and target."""
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        raise TrainingCallError(
            field, f"it returned {_shown(batches)}, which is no iterable; yield (inputs, target), batch by batch"
        )
    for batch in batches:
        try:
            inputs, target = batch
        except (TypeError, ValueError):
            raise TrainingCallError(field, f"a batch is {_shown(batch)}; each has to be (inputs, target)") from None
        yield inputs, target


def movable(target: Any) -> Any:
    """The target of a training batch. Raises TrainingCallError where it is nothing that moves to a device."""
    if not hasattr(target, "to"):
        raise TrainingCallError(BATCHES, f"a target is {_shown(target)}; each has to be a Tensor")
    return target


def scalar(loss: object) -> Tensor:
    """The loss. Raises TrainingCallError where it is no Tensor of one number that has a gradient."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TrainingCallError(LOSS, f"it returned {_shown(loss)}; return a Tensor of one number")
    if not loss.requires_grad:
        raise TrainingCallError(LOSS, "its result has no gradient; compute it from the output, without detaching it")
    return loss


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a Tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return reprlib.repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
