"""Calls of a policy's `train` functions, and checks of what they return: a user's mistake there has a place."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar

from torch import OutOfMemoryError, Tensor, nn

from loka.errors import InputError
from loka.model.callables import describe_error, message_of, place_of
from loka.model.inputs import arguments, tensors_in, to_device

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
        super().__init__(message)
        self.field = field

    def __str__(self) -> str:
        return f"{self.field}: {place_in_run(self)}{super().__str__()}"


@contextmanager
def at(place: str) -> Iterator[None]:
    """Context of a part of a run: "seed 3", "step 7". An exception that leaves it notes the place."""
    try:
        yield
    except Exception as error:
        error.add_note(place)
        raise


def place_in_run(error: BaseException) -> str:
    """The places of `at` that an exception has left, the widest first: "seed 3, step 7: ", or ""."""
    notes: list[str] = getattr(error, "__notes__", [])
    return f"{', '.join(reversed(notes))}: " if notes else ""


def called(field: str, function: Callable[..., Result], *given: Any) -> Result:
    """The function's result. Raises TrainingCallError where it does not take what is given.

    Errors of the author's own code stay.
    """
    try:
        return function(*given)
    except Exception as error:
        if isinstance(error, TypeError) and not _is_inner(error):
            raise TrainingCallError(field, f"it is called with {_ARGUMENTS[field]}: {error}; correct it") from error
        if not _from_torch(error):
            raise
        forms = " and ".join(map(form_of, given))
        raise TrainingCallError(field, f"it does not take {forms}: {message_of(error)}") from error


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
    for number in count(1):
        with at(place_of_batch(field, number)):
            try:
                batch = next(iterator)
            except StopIteration:
                return
            except RuntimeError as error:  # of a generator that calls `next` at its end
                if not isinstance(error.__cause__, StopIteration):
                    raise
                where = place_of(error.__cause__)
                where = f", at {where}" if where else ""
                raise TrainingCallError(
                    field, f"its generator raised StopIteration{where}; end it with return"
                ) from error
            try:
                inputs, target = batch
            except (TypeError, ValueError):
                raise TrainingCallError(field, f"a batch is {_shown(batch)}; each has to be (inputs, target)") from None
        yield inputs, target


def place_of_batch(field: str, number: int) -> str:
    """The place of a batch, counted from 1, as `at` takes it: a step of training, or a test batch."""
    return f"{'step' if field == BATCHES else 'batch'} {number}"


def _is_inner(error: Exception) -> bool:
    """True if an error was raised within what was called, and not by calling it."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is not None


def _from_torch(error: Exception) -> bool:
    """True if torch raised an error in what is called from here, without code of the author's or of LoKA's between."""
    return place_of(error).startswith(f"{__file__}:") and not isinstance(error, OutOfMemoryError)


def moved(field: str, value: Any, device: str) -> Any:
    """The inputs or the target of one of the field's batches on the device. Raises TrainingCallError if they cannot."""
    try:
        return to_device(value, device)
    except (RuntimeError, NotImplementedError) as error:
        raise TrainingCallError(
            field, f"the inputs cannot be moved to {device}: {describe_error(error)}; yield Tensors with values"
        ) from error


def forward(field: str, model: nn.Module, inputs: Inputs) -> Any:
    """The model's output for the inputs of one of the field's batches, which are on its device.

    Raises TrainingCallError where forward does not take them; errors of the author's own code stay.
    """
    try:
        return call(model, inputs)
    except Exception as error:
        if not _from_torch(error):
            raise
        raise TrainingCallError(
            field, f"forward does not take a batch's inputs: {message_of(error)}; they are {form_of(inputs)}"
        ) from error


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
    """Call the model with the inputs of a batch, as `arguments` takes them."""
    args, kwargs = arguments(model, inputs)
    return model(*args, **kwargs)


def samples_in(target: Any) -> int | None:
    """The samples of a target: the rows of its first tensor; None where it has no tensor with dimensions."""
    return next((tensor.shape[0] for tensor in tensors_in(target) if tensor.dim()), None)


def movable(target: Any) -> Any:
    """The target of a training batch. Raises TrainingCallError where it is nothing that moves to a device."""
    if not hasattr(target, "to") and not tensors_in(target):
        raise TrainingCallError(BATCHES, f"a target is {_shown(target)}; each has to be a Tensor, or hold some")
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


def form_of(value: object) -> str:
    """A value as shown in a message: the shape of a Tensor, or a container of shapes."""
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(f'{name}: {form_of(each)}' for name, each in value.items())}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {' and '.join(map(form_of, value))}"
    return type(value).__name__
