"""A model that a user holds, in the place of the functions that a policy names: a Python module made for the time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from loka.dispatch.bind.bound import Bound, is_sharded
from loka.dispatch.bind.check_model import BOUND_ALREADY
from loka.dispatch.bind.wrappers import ClosedWrapperError, unwrap
from loka.dispatch.dispatch_errors import BindError
from loka.errors import Code, InputError
from loka.graph.trace.tracer import BATCHES
from loka.model.copying import copy_model
from loka.model.inputs import arguments, cut_inputs, tensors_in, to_device
from loka.model.large_tensors import LARGE

LEAST = max(BATCHES)  # samples: forwards are traced at two batch sizes, cut from the example
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class LiveModel:
    """A model, and a batch of its inputs on its device. `batch_size`: the samples in it."""

    module: nn.Module
    inputs: Any  # a tuple of positional arguments, or a dict of keywords, or the one argument
    batch_size: int
    frozen: bool  # copies need no gradients: it is for inference

    @classmethod
    def of(cls, model: object, example_inputs: object, frozen: bool) -> LiveModel:
        """Raises InputError for what is no model that can be bound, or no batch of inputs."""
        module = _checked(model)
        inputs = tuple(example_inputs) if isinstance(example_inputs, list) else example_inputs
        if not isinstance(inputs, Tensor | tuple | Mapping):
            raise InputError(
                f"example_inputs is a {type(inputs).__name__}; give one tensor, a tuple of positional arguments, or a "
                "dict of keyword arguments",
                Code.INPUTS,
            )
        rows = [tensor.shape[0] for tensor in tensors_in(inputs) if tensor.dim()]
        size = max(rows, key=rows.count, default=0)  # the first of those that are equally frequent
        if size < LEAST:
            raise InputError(
                f"example_inputs has {size} samples, and a plan is made for a batch size: give {LEAST} or more, best "
                "as many as a training step has",
                Code.INPUTS,
            )
        return cls(module, inputs, size, frozen)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments of the forward, copied, as a forward may write into them."""
        return arguments(self.module, cut_inputs(self.inputs, self.batch_size, self.batch_size))

    def copy(self, device: str | None = None) -> nn.Module:
        """A copy in training mode that shares the values of Parameters; gradients and buffers are its own.

        On another device the values are copied, but for tensors that are too large for planning: these have none.
        """

        def stand_in(tensor: Tensor) -> Tensor:
            made = tensor.detach()
            if device is not None and made.nbytes > LARGE:
                made = made.to("meta")
            elif device is not None:
                made = made.to(device)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(made, tensor.requires_grad and not self.frozen)
            return made.clone()

        copied = copy_model(self.module, stand_in)[""]
        return copied if copied.training else copied.train()

    @contextmanager
    def importable(self) -> Iterator[str]:
        """Context in which a Python module has `build` and `example_inputs` for this model; yields its name."""
        home = ModuleType(f"loka_live_model_{next(_numbers)}", "A model that loka.fp8 was called with.")
        inputs = to_device(cut_inputs(self.inputs, self.batch_size, self.batch_size), "cpu")
        vars(home).update(
            build=lambda: self.copy("cpu"),
            example_inputs=lambda batch_size: cut_inputs(inputs, self.batch_size, batch_size),
        )
        sys.modules[home.__name__] = home
        try:
            yield home.__name__
        finally:
            del sys.modules[home.__name__]


def _checked(model: object) -> nn.Module:
    """The model, if it can be bound as it is. Raises InputError otherwise."""
    if not isinstance(model, nn.Module):
        raise InputError(f"loka.fp8 takes the model, an nn.Module, not {type(model).__name__}", Code.ARGUMENT)
    try:
        wrapped = type(model).__name__ if unwrap(model) is not model else ""
    except ClosedWrapperError as error:
        wrapped = str(error)
    if wrapped:
        raise InputError(
            f"the model is compiled or wrapped ({wrapped}): give loka.fp8 the model itself, and compile, wrap or shard "
            "it afterwards",
            Code.WRAPPED,
        )
    if isinstance(model, nn.Linear):
        raise InputError(
            "the model is a bare Linear, and LoKA replaces modules inside of a model: put it into an nn.Sequential",
            Code.MODEL,
        )
    bound = [name or "the model itself" for name, module in model.named_modules() if isinstance(module, Bound)]
    if bound:
        raise BindError(
            "loka.fp8 does not fit this model, which is left as it was:",
            Code.OTHER_MODEL,
            [f"{name}: {BOUND_ALREADY}" for name in bound],
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise InputError(f"{name!r} of the model is lazy: call the model once, so that it has a size", Code.MODEL)
        if tensor.is_meta:
            raise InputError(f"{name!r} of the model is on the meta device: give it weights first", Code.MODEL)
        if is_sharded(tensor):
            raise InputError(f"{name!r} of the model is sharded: call loka.fp8 before fully_shard", Code.WRAPPED)
    return model
