"""The whole model as it was planned: its parts, by which `apply` finds what a live model has beside them.

Imports only torch and the standard library beside LoKA's errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from loka.graph.call_inputs import described, inputs_of
from loka.graph.capture.captured import CannotCaptureError
from loka.graph.fake_module import FakeModules, floating_dtype
from loka.graph.wrappers import innermost

_WRAPPED, _FLAT = "_fsdp_wrapped_module", "_flat_param"  # names that FullyShardedDataParallel adds


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The parts of a planned model, and arguments like those of its forward."""

    parameters: tuple[str, ...]  # their names, which name the modules that hold them
    modules: tuple[str, ...]  # names of those that hold neither Parameters nor modules
    batch_size: int
    inputs: str = ""  # a literal: the arguments, by `described`; "" where they have none
    dtype: str = ""  # of all floating-point tensors of the model: "float32"; "" if they have several
    frozen: tuple[str, ...] = ()  # the Parameters that need no gradient


@dataclass(frozen=True, slots=True)
class Part:
    """A Parameter and the module that holds it, or a module that holds neither Parameters nor modules."""

    name: str
    module: nn.Module
    parameter: nn.Parameter | None = None


def planned_model(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_size: int) -> PlannedModel:
    """The parts of a model that is planned with these arguments."""
    try:
        inputs = described((args, kwargs), (args, kwargs))
    except CannotCaptureError:
        inputs = ""
    dtype = floating_dtype(module)
    parts = list(parts_of(module))
    return PlannedModel(
        tuple(part.name for part in parts if part.parameter is not None),
        tuple(part.name for part in parts if part.parameter is None),
        batch_size,
        inputs,
        str(dtype).removeprefix("torch.") if dtype else "",
        tuple(part.name for part in parts if part.parameter is not None and not part.parameter.requires_grad),
    )


def parts_of(model: nn.Module, path: str = "") -> Iterator[Part]:
    """The parts of a model, beneath whatever wrappers."""
    model = innermost(model)
    below = f"{path}." if path else ""
    own = dict(model.named_parameters(recurse=False, remove_duplicate=False))
    children = {name: child for name, child in model._modules.items() if child is not None}
    if not own and not children:
        yield Part(path, model)
    for name, parameter in own.items():
        if name != _FLAT:
            yield Part(f"{below}{name}", model, parameter)
    for name, child in children.items():
        yield from parts_of(child, path if name == _WRAPPED else f"{below}{name}")


def unknown_parts(planned: PlannedModel, names: Iterable[str]) -> dict[str, str]:
    """For each of the names that is not of a planned part, the outermost module on its way that the plan does not know.

    That is the name itself for a Parameter of a known module. What a Parameter holds ("kernels.2") is known with it.
    """
    parameters = set(planned.parameters)
    known = {prefix for part in (*planned.parameters, *planned.modules) for prefix in _prefixes(part)}
    found = {}
    for name in names:
        first = next((each for each in _prefixes(name) if each in parameters or each not in known), "")
        if first and first not in parameters:
            found[name] = first
    return found


def _prefixes(name: str) -> Iterator[str]:
    return accumulate(name.split("."), lambda path, part: f"{path}.{part}")


def without_values(model: nn.Module, planned: PlannedModel) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A live model on the meta device, without wrappers, hooks and what LoKA added, and arguments as planned.

    Raises CannotCaptureError for arguments that the plan could not describe, or of a class that is not imported here.
    """
    if not planned.inputs:
        raise CannotCaptureError("the package cannot describe the arguments of its forward")
    dtype = getattr(torch, planned.dtype) if planned.dtype else None
    args, kwargs = inputs_of(planned.inputs, FakeModules(torch.device("cpu"), dtype, mode=nullcontext()))
    return FakeModules(torch.device("meta"), dtype, mode=nullcontext()).module(model), args, kwargs
