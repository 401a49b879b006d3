"""Example inputs of a policy's model: from a function of the author's, or the first batch of training."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from loka.errors import Code, InputError
from loka.model.callables import call, find_callable
from loka.model.inputs import arguments, tensors_in

_NAME, INPUTS, BATCHES = "example_inputs", "model.inputs", "train.batches"
_SEEDS = 2**32  # all that numpy takes


@dataclass(frozen=True, slots=True)
class ExampleInputs:
    """The positional and keyword arguments of a model's forward, for a number of samples, drawn by a seed."""

    module: nn.Module
    make: Callable[[int, int], object]
    spec: str  # "clicks:inputs", as messages name it
    field: str  # of the policy: "model.inputs"

    def __call__(self, batch: int, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make them. Raises InputError for what the author's function raises, and for a wrong type."""
        with seeded(seed):
            made = self.make(batch, seed)
        if isinstance(made, Tensor | tuple | Mapping):
            args, kwargs = arguments(self.module, made)
            if wrong := [key for key in kwargs if not isinstance(key, str)]:
                raise InputError(
                    f"{self.field}: {self.spec} returned a dict with the key {wrong[0]!r}; its keys name arguments of "
                    "forward",
                    Code.INPUTS,
                )
            return args, kwargs
        raise InputError(
            f"{self.field}: {self.spec} returned {kind_of(made)}; return a tuple of positional arguments, one tensor, "
            "or a dict of keyword arguments",
            Code.INPUTS,
        )


def example_inputs(
    module: nn.Module, home: ModuleType, factory: str, inputs: str | None, batches: str | None
) -> ExampleInputs:
    """What makes the inputs of `module`, which `factory` of the Python module `home` has made.

    The first that there is: `inputs`; the model's method `example_inputs`; the function of that name in `home`; the
    first of `batches`. Raises InputError where there is none, or a named one is not found.
    """
    if inputs is not None:
        return _of_size(module, find_callable(inputs, INPUTS)[0], inputs)
    for holder, spec in ((module, f"{type(module).__name__}.{_NAME}"), (home, f"{home.__name__}:{_NAME}")):
        found = getattr(holder, _NAME, None)
        if callable(found):
            return _of_size(module, found, spec)
    if batches is not None:
        return _of_first_batch(module, find_callable(batches, BATCHES)[0], batches)
    raise InputError(
        f"{INPUTS}: no example inputs for {factory}: neither {type(module).__name__} has a method {_NAME}(batch_size) "
        f"nor {home.__name__} a function of that name; write one, or (by --inputs or --batches of loka "
        f"init) name a function in {INPUTS}, or the batches of training in {BATCHES}",
        Code.INPUTS,
    )


def kind_of(value: object) -> str:
    """`None`, or `a list`."""
    return "None" if value is None else f"a {type(value).__name__}"


def _of_size(module: nn.Module, function: Callable[..., object], spec: str) -> ExampleInputs:
    def make(batch: int, seed: int) -> object:
        return call(function, (batch,), spec, INPUTS)

    return ExampleInputs(module, make, spec, INPUTS)


def _of_first_batch(module: nn.Module, function: Callable[..., object], spec: str) -> ExampleInputs:
    def first(batch: int, seed: int) -> object:
        found: Any = function(batch, seed)
        batches: Iterator[object] = iter(found)
        for each in batches:
            return each
        raise InputError("there is no batch in what it returned; yield (inputs, target)", Code.INPUTS)

    def make(batch: int, seed: int) -> object:
        pair = call(first, (batch, seed % _SEEDS), spec, BATCHES)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(
                f"{BATCHES}: the first batch of {spec} is {kind_of(pair)}; each has to be (inputs, target)",
                Code.INPUTS,
            )
        inputs, target = pair
        shapes = [tuple(tensor.shape) for tensor in tensors_in(target)]
        if shapes and all(batch not in shape for shape in shapes):
            raise InputError(
                f"{BATCHES}: {spec}, asked for batches of {batch}, begins with a target of shape "
                f"{' and '.join(map(str, shapes))}; yield as many samples as are asked for, or name a function that "
                f"makes example inputs of any batch size in {INPUTS}",
                Code.INPUTS,
            )
        return tuple(inputs) if isinstance(inputs, list) else inputs

    return ExampleInputs(module, make, spec, BATCHES)


_SEED = 0


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the random state after the block: of Python, of torch on the CPU, and of numpy if it is imported."""
    python, numbers = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(numbers)
        if numpy:
            numpy.random.set_state(numpy_state)


@contextmanager
def seeded(seed: int = _SEED) -> Iterator[None]:
    """As `random_state_kept`, with the same seed each time, so that inputs that are drawn give the same plan."""
    with random_state_kept():
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % 2**32)  # all that numpy takes
        yield
