"""Builds the model that a policy names, and an example of its inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._pytree import tree_leaves, tree_map

from loka.errors import Code, InputError
from loka.model.callables import (
    call,
    current_directory_importable,
    describe_error,
    find_callable,
)
from loka.model.copying import copy_model
from loka.model.example_inputs import ExampleInputs, example_inputs, kind_of
from loka.model.large_tensors import LARGE, LargeToMeta, without_numbers

_LARGE_INPUT = 1 << 20  # bytes


@dataclass(frozen=True)
class BuiltModel:
    """A model with one example of the inputs of its forward: `module(*args, **kwargs)`."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch_size: int


def build_model(
    factory: str,
    inputs: str | None,
    batch_size: int,
    *,
    batches: str | None = None,
    large: int = LARGE,
    module: nn.Module | None = None,
) -> BuiltModel:
    """Build the model that a policy names, and one batch of example inputs. The forward is not run.

    Inputs that are drawn at random are the same each time.

    Args:
        factory: "package.module:name" of a function without arguments that returns an nn.Module.
        inputs: "package.module:name" of a function of the batch size that returns the positional arguments (a tuple,
            or one tensor) or the keyword arguments (a dict). None: the model's method `example_inputs`, otherwise the
            function of that name in the factory's module, otherwise the first of `batches`.
        batch_size: Samples in a batch.
        batches: "package.module:name" of a function of (batch_size, seed) that yields (inputs, target).
        large: Tensors of more than this number of bytes are built on the meta device.
        module: The model, where `build_module` has built it already.

    Raises:
        InputError: Something cannot be found or called, or returns a wrong type. A model with lazy modules
            (nn.LazyLinear) is run once on the example inputs; also if that fails.
    """
    if batch_size < 1:
        raise InputError(f"model.batch_size: {batch_size} is not a number of samples; write 1 or more", Code.VALUE)
    with current_directory_importable():
        module = build_module(factory, large) if module is None else module
        examples = example_inputs(module, find_callable(factory, "model.factory")[1], factory, inputs, batches)
        args, kwargs = examples(batch_size)
        _check_numbers((args, kwargs), examples)
        _initialise_lazy(module, args, kwargs, factory)
    return BuiltModel(module, args, kwargs, batch_size)


def build_module(factory: str, large: int = LARGE) -> nn.Module:
    """The model that a factory makes, without inputs; lazy modules are as they are.

    Raises InputError where there is no such factory, it raises, or its result is no model of LoKA's.
    """
    with current_directory_importable():
        make = find_callable(factory, "model.factory")[0]
        with LargeToMeta(large):
            module: object = call(make, (), factory, "model.factory")
        if not isinstance(module, nn.Module):
            found = kind_of(module)
            raise InputError(
                f"model.factory: {factory}() returned {found}, not an nn.Module; return the model from it",
                Code.MODEL,
            )
        if isinstance(module, nn.Linear):
            raise InputError(
                f"model.factory: {factory}() returned a bare {type(module).__name__}, and LoKA replaces modules inside "
                f"of a model; return nn.Sequential(linear), or a module that holds it",
                Code.MODEL,
            )
        _refuse_scripted(module, factory)
        if "_orig_mod" in module._modules:  # torch.compile's wrapper: names would have a prefix
            raise InputError(
                f"model.factory: {factory}() returned a compiled model; return the model that it compiles",
                Code.MODEL,
            )
    return module


def light_copy(built: BuiltModel) -> BuiltModel:
    """A copy of a built model, to be changed on its own: its tensors are shared. Its inputs are those of `light`.

    Raises any exception of the model's own copying.
    """
    module = copy_model(built.module, lambda tensor: tensor)[""]
    return replace(light(built), module=module)


def light(built: BuiltModel) -> BuiltModel:
    """The built model with zeros that take no memory for its large inputs: a run on fake tensors reads no values."""

    def stand_in(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or not leaf.is_contiguous():
            return leaf
        if not leaf.is_floating_point() or leaf.nbytes < _LARGE_INPUT:
            return leaf
        return (
            torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape).requires_grad_(leaf.requires_grad)
        )

    args, kwargs = tree_map(stand_in, (built.args, built.kwargs))
    return replace(built, args=args, kwargs=kwargs)


def _refuse_scripted(module: nn.Module, factory: str) -> None:
    for path, owner in module.named_modules():
        if isinstance(owner, torch.jit.ScriptModule):
            where = f"{path!r} of {factory}()" if path else f"what {factory}() returned"
            raise InputError(
                f"model.factory: {where} is a ScriptModule, whose forward cannot be replaced; return the "
                "model as it is before torch.jit.script or torch.jit.trace",
                Code.MODEL,
            )


def _check_numbers(inputs: object, examples: ExampleInputs) -> None:
    spec, field = examples.spec, examples.field
    leaves = tree_leaves(inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_nested]
    if tensors and all(tensor.numel() == 0 for tensor in tensors):
        raise InputError(
            f"{field}: {spec} returned empty tensors alone; return as many samples as are asked for", Code.INPUTS
        )
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_nested:
            raise InputError(
                f"{field}: {spec} returned a nested tensor, which has no sizes; return its values and offsets as "
                "two tensors",
                Code.INPUTS,
            )
        found = without_numbers(leaf) if isinstance(leaf, Tensor) else None
        if found is not None:
            raise InputError(
                f"{field}: a tensor that {spec} returned is {found}, without numbers; make it on the CPU, of any "
                "values that the model takes",
                Code.INPUTS,
            )


def _initialise_lazy(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], factory: str) -> None:
    """Run a model with lazy parameters once, in evaluation and without gradients, so that their sizes are known."""
    name = _first_lazy(module)
    if name is None:
        return
    training = {m: m.training for m in module.modules()}
    try:
        with torch.no_grad():
            module.eval()
            module(*args, **kwargs)
    except Exception as error:
        raise InputError(
            f"model.factory: {factory}() has the lazy parameter {name!r}, and running it once on the example inputs "
            f"raised {describe_error(error)}; run the model once in the factory, or give the sizes",
            Code.MODEL,
        ) from error
    finally:
        for part in module.modules():
            part.training = training.get(part, part.training)
    name = _first_lazy(module)
    if name is not None:
        raise InputError(
            f"model.factory: the lazy parameter {name!r} of {factory}() was not reached by the example inputs, so that "
            f"its size is unknown; give its size, or take the module out",
            Code.MODEL,
        )


def _first_lazy(module: nn.Module) -> str | None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            return name
    return None
